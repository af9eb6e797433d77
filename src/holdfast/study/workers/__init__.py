"""Plain scripts that measure a framework inside its own environment: ``python measure.py FRAMEWORK TASK.json ROWS.jsonl``.

They import nothing of Holdfast, but ``with_holdfast.py``, which measures Holdfast itself.
"""
