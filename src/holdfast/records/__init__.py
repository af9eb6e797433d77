"""Records of a run: their types, the files that hold them, and the beacons that publish what each worker is doing."""

from holdfast.records.files import load_events, read_records, read_run

__all__ = ["load_events", "read_records", "read_run"]
