"""Reads logs of failures and preemptions as they are published, and fits distributions of lifetimes to them.

A log is one of seven forms, which :mod:`.recognize` tells apart by column names and values:

* ``lifetimes``: a column of lifetimes, with or without one that says which of them ended in a failure;
* ``lives``: begin and end of the time that each machine was up;
* ``outages``: begin and end of the time that each machine was down;
* ``events``: time, machine, and what happened, in columns, in JSON, or in lines of a system's log;
* ``failures``: time and machine; each row is a failure;
* ``snapshots``: time, machine, and whether it has failed, again and again;
* ``sizes``: the number of machines over time.

:func:`~holdfast_lab.simulate.logs.reading.read_log` turns each into lifetimes, some of them right-censored, and where
the log has a time axis into a trace that can be replayed. :func:`~holdfast_lab.simulate.logs.fitting.fit_lifetimes`
fits by maximum likelihood. It needs SciPy, which is imported only then.
"""
