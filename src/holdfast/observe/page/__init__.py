"""The page of a run with its figures; it needs jinja2 and matplotlib, which nothing here imports before a page is drawn."""
