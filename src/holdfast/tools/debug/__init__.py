"""What helps to find out why a run recovered or hung: bundles of everything known about a run."""
