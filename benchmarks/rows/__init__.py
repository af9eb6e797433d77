"""The rows of the one table that ``make bench`` prints: what is measured, how, and how the table is written."""
