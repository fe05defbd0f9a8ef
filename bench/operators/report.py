def write_report(path, records, samples, combinations): pass
