"""The order of additions that a job chooses: the same at all workers, whichever of them know it already."""

from types import SimpleNamespace

import pytest
from train_reference import train

from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.state import order_choice
from holdfast.state.order_choice import choose_order, order_of_checkpoint


def member(order="auto", known="", processes=2, maximum=None):
    comm = SimpleNamespace(processes=((0,),) * processes, maximum=maximum)
    return SimpleNamespace(settings=Settings(order=order), loops=SimpleNamespace(order=known), comm=comm)


def choices(monkeypatch, *members):
    """What each of these members chooses: its host, the order that it was given, and the one that it knows."""
    given = []

    def choose(maximum):
        chosen = []
        for host, order, known in members:
            monkeypatch.setattr(order_choice, "host_id", lambda host=host: host)
            chosen.append(choose_order(member(order, known, len(members), maximum)))
        return chosen

    choose(lambda values: given.append(values) or list(values))
    return choose(lambda _: [max(each) for each in zip(*given, strict=True)])


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([(7, "auto", ""), (7, "auto", "")], "fold"),
        ([(7, "auto", ""), (8, "auto", ""), (7, "auto", "")], "tree"),
        ([(0, "auto", ""), (2**63 - 1, "auto", "")], "tree"),
        ([(7, "auto", "fold"), (8, "auto", "")], "fold"),
        ([(7, "auto", ""), (7, "auto", "tree")], "tree"),
        ([(7, "fold-wide", "fold-wide"), (8, "fold-wide", "fold-wide")], "fold-wide"),
        ([(7, "auto", ""), (8, "fold", "fold")], "fold"),
    ],
    ids=["one-host", "two-hosts", "far-apart", "began-on-one", "began-on-two", "given", "given-to-some"],
)
def test_all_members_choose_the_same_order(monkeypatch, members, expected):
    assert choices(monkeypatch, *members) == [expected] * len(members)


def test_members_that_were_given_different_orders_stop(monkeypatch):
    with pytest.raises(
        ConfigError, match="workers were started with order fold and with tree: give all the same --order"
    ):
        choices(monkeypatch, (7, "tree", "tree"), (7, "fold", "fold"))


def test_one_process_asks_no_other():
    assert choose_order(member(processes=1)) == "fold"
    assert choose_order(member(processes=1, known="tree")) == "tree"


def test_a_checkpoint_decides_unless_another_order_was_given():
    assert order_of_checkpoint(member(), "tree") == "tree"
    assert order_of_checkpoint(member("fold", "fold"), "fold") == "fold"
    with pytest.raises(ConfigError, match="was made with order=tree, but this run has order=fold: leave --order out"):
        order_of_checkpoint(member("fold", "fold"), "tree")


def test_a_run_in_a_tree_is_resumed_in_a_tree_without_a_word(tmp_path):
    _, tree = train("mlp", "adam", workers=4, order="tree")
    with pytest.raises(SystemExit):
        train("mlp", "adam", workers=4, order="tree", checkpoint_dir=str(tmp_path), stop_after=4)

    _, resumed = train("mlp", "adam", workers=3, checkpoint_dir=str(tmp_path), resume=True)

    assert resumed == tree != train("mlp", "adam", workers=4)[1]
