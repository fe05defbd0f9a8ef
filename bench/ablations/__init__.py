"""The effect of each mechanism: the same reference problems ("anchors") with one mechanism switched off: ``python -m bench.ablations``."""
