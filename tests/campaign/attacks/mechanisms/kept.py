"""What ``prepare`` made, for ``strike`` and ``repair`` of the same plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from campaign.attacks.base import Launch

T = TypeVar("T")


class Kept(Generic[T]):
    """One thing for each plan that runs, shared by all attacks of the plan."""

    def __init__(self) -> None:
        self._by_folder: dict[Path, T] = {}

    def get(self, launch: Launch) -> T:
        """Return the thing of a plan."""
        return self._by_folder[launch.folder]

    def make(self, launch: Launch, make: Callable[[], T]) -> tuple[T, bool]:
        """Return the thing of a plan, and whether it was made by this call; it is forgotten after the plan."""
        if launch.folder in self._by_folder:
            return self._by_folder[launch.folder], False
        made = self._by_folder[launch.folder] = make()
        launch.undo.callback(self._by_folder.pop, launch.folder)
        return made, True
