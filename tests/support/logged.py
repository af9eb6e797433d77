"""Reading experiment logs back, with the readers of the packages that show them."""

from holdfast.loggers.tensorboard import read_events


def scalars_of(folder):
    """The scalars of a TensorBoard folder as TensorBoard reads them: by tag, a list of step and value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    log.Reload()
    return {tag: [(each.step, each.value) for each in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def steps_on_disk(folder):
    """The steps of all event files of a folder, in the order of the files, read without TensorBoard's accumulator."""
    files = sorted(folder.glob("events.out.tfevents.*"))
    return [event.step for file in files for event in read_events(file) if event.summary.value]
