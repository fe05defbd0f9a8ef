"""An HTML report of a plan or program: one page with everything inside. Only reads data and imports no pass.

In: a plan or program, and what only the process that planned knows (``Parts``: timeline, memory, answers). Out: the text of the page.
``data.py`` makes one dict of plain data (``graph_data.py``: nodes and edges; ``pictures.py``: which rank holds which block; ``answers.py``:
other layouts), ``page.py`` puts it into ``static/template.html`` with the style and code. ``static/vendor`` has the libraries, which
``tools/vendor_js.py`` fetches, and their licences.
"""

from fxshard.inspect.report.answers import costliest
from fxshard.inspect.report.data import Parts, report_data
from fxshard.inspect.report.page import report_html

__all__ = ["Parts", "costliest", "report_data", "report_html"]
