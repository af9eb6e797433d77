"""What is written down of a run: types of records, the files that hold them, and beacons that tell where workers are."""

from holdfast.records.files import load_events, read_records, read_run

__all__ = ["load_events", "read_records", "read_run"]
