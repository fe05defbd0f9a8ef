"""What each mechanism buys: the same anchors with one of them switched off: ``python -m bench.ablations``."""
