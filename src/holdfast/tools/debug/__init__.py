"""What helps to find out why a run recovered or hung: stacks of workers, and bundles of everything known about a run."""
