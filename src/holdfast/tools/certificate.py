"""Certified steps of a run, and the check that its records are consistent: no line was altered, dropped or repeated.

This check does not detect a party that alters records and recomputes all links. Recomputing the steps detects that
(``holdfast verify``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast.integrity.hash_chain import (
    GENESIS,
    digest_of_parts,
    digest_of_tensors,
    fits,
    link_of,
    number_of_tensors,
)
from holdfast.records.types import Finished, JobRestarted, Record, Recovered, RunStarted, StateHashed, StepCommitted
from holdfast.recovery.decisions import decision_of
from holdfast.recovery.vote import MinMax


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFinding:
    """An inconsistency in the records of a run.

    Args:
        step: The step in which it is visible.
        what: One line, which begins with the step.
    """

    step: int
    what: str


class CertifiedSteps:
    """The steps of a run that have a hash-chain link.

    Args:
        records: Records of the run.
        name: Name of the run, for messages.

    Raises:
        ConfigError: if there are none.
    """

    def __init__(self, records: Sequence[Record], name: str) -> None:
        self.name = name
        self.records = sorted(records, key=lambda record: record.t_s)
        self.lines: dict[int, list[StepCommitted]] = {}
        for record in self.records:
            if isinstance(record, StepCommitted):
                self.lines.setdefault(record.step, []).append(record)
        begun = [record.step for record in self.records if isinstance(record, RunStarted)]
        if not begun or not any(line.link for lines in self.lines.values() for line in lines):
            raise ConfigError(self._why_none())
        self.first, self.last = min(*begun, *self.lines), max(self.lines)
        self.steps = {step: lines[-1] for step, lines in sorted(self.lines.items())}
        """Lines of steps by number; for a step that was committed again, the last line."""
        self.wholes: dict[int, dict[str, str]] = {}
        """Digests of all tensors before a step, by path."""
        self._parts: dict[tuple[int, int], list[StateHashed]] = {}
        for record in self.records:
            if isinstance(record, StateHashed) and record.tensors:
                digests = self.wholes.get(record.step, {}) if record.parts else {}
                self.wholes[record.step] = digests | dict(record.tensors)
                if record.parts:
                    self._parts.setdefault((record.step, record.part), []).append(record)

    @property
    def parts(self) -> int:
        """Number of parts that the model is split into, 0 if it is not split."""
        return next((records[0].parts for records in self._parts.values()), 0)

    def holders(self, step: int) -> list[StateHashed]:
        """Return the hashes of the parts of a split model before a step, from holders whose links show one history."""
        return [r for (at, _), records in sorted(self._parts.items()) if at == step for r in _alike(records)]

    def digests(self, step: int) -> dict[str, set[str]]:
        """Return the digests of all tensors before a step, by path: several for one in which its holders differ."""
        digests: dict[str, set[str]] = {}
        for tensors in [holder.tensors for holder in self.holders(step)] or [self.wholes.get(step, {})]:
            for path, digest in tensors.items():
                digests.setdefault(path, set()).add(digest)
        return digests

    def _why_none(self) -> str:
        if not self.lines:
            return f"{self.name} has no records of committed steps: give the folder that `holdfast run --report` wrote"
        return f"the steps of {self.name} have no certificate: there is none with --no-certificate, under torch.distributed"

    def before(self, step: int) -> set[str]:
        """Return the recorded links of the step before ``step``; empty if the records have none."""
        if step > self.first:
            return {line.link for line in self.lines.get(step - 1, ())}
        starts = (r for r in self.records if isinstance(r, RunStarted) and r.step == step and r.link)
        return {start.link for start in starts}

    @property
    def started(self) -> RunStarted:
        """The start record of the first worker that began."""
        return next(record for record in self.records if isinstance(record, RunStarted))

    @property
    def begins_anew(self) -> bool:
        """Whether the hash chain begins after the start of training, because it resumed from a state without one."""
        return self.first > 0 and self.before(self.first) == {GENESIS}

    @property
    def finished(self) -> list[Finished]:
        """The workers that finished, in ascending order; empty if the run did not finish."""
        ends = [record for record in self.records if isinstance(record, Finished)]
        last = max((end.step for end in ends), default=-1)
        return [end for _, end in sorted({end.rank: end for end in ends if end.step == last}.items())]

    # -- checks of the records

    def check(self) -> list[CertificateFinding]:
        """Return where lines were altered, dropped or repeated, in the order of steps; empty if all links hold."""
        findings = [*self._repeated(), *self._broken(), *self._missing_end(), *self._other_wholes()]
        return sorted(findings, key=lambda finding: finding.step)

    def _repeated(self) -> Iterator[CertificateFinding]:
        """Yield lines of one worker about a step that it had already committed and that was not rolled back."""
        newest: dict[int, int] = {}
        for record in self.records:
            if isinstance(record, JobRestarted) or (
                isinstance(record, Recovered) and decision_of(record.decision).goes_back
            ):
                newest.clear()
            elif isinstance(record, StepCommitted):
                if record.step <= newest.get(record.rank, -1):
                    yield CertificateFinding(step=record.step, what=f"step {record.step}: its line is repeated")
                newest[record.rank] = record.step

    def _broken(self) -> Iterator[CertificateFinding]:
        for step in range(self.first, self.last + 1):
            lines = {line.link: line for line in self.lines.get(step, ())}
            if not lines:
                yield CertificateFinding(step=step, what=f"step {step}: its line is missing")
            before = self.before(step)
            for line in lines.values():
                if before and line.link not in {_link(link, line) for link in before}:
                    what = "its link does not match its line and the previous link: one of them was altered"
                    yield CertificateFinding(step=step, what=f"step {step}: {what}")
            for line in self.lines.get(step, ()):
                if not fits(line.figures, line.metrics):
                    yield CertificateFinding(step=step, what=f"step {step}: its metrics differ from the certified ones")

    def _missing_end(self) -> Iterator[CertificateFinding]:
        end = max((record.step for record in self.finished), default=self.last + 1) - 1
        if end > self.last:
            steps = f"step {end}" if end == self.last + 1 else f"steps {self.last + 1} to {end}"
            yield CertificateFinding(
                step=self.last + 1, what=f"{steps}: no lines, but training continued to step {end}"
            )

    def _other_wholes(self) -> Iterator[CertificateFinding]:
        for step, tensors in self.wholes.items():
            line = self.steps.get(step)
            if line is not None and line.whole and self._digest_of_whole(step, tensors) not in ("", line.state):
                what = "the digests of its tensors do not match the digest of its state"
                yield CertificateFinding(step=step, what=f"step {step}: {what}")

    def _digest_of_whole(self, step: int, tensors: dict[str, str]) -> str:
        """Return the digest of the state before a step, from those of its tensors; "" if some are missing."""
        of_parts = {part: records for (at, part), records in sorted(self._parts.items()) if at == step}
        if not of_parts:
            return digest_of_tensors(tensors)
        if len(of_parts) < next(iter(of_parts.values()))[0].parts or any(
            self._odd_holders(r) for r in of_parts.values()
        ):
            return ""
        numbers = (number_of_tensors(records[-1].tensors) for records in of_parts.values())
        votes = [vote for number in numbers for vote in MinMax.of([number]).pack()]
        return f"{digest_of_parts(votes):016x}"

    def twice(self) -> list[CertificateFinding]:
        """Return the steps that were committed again with different results; the last time counts.

        The reason is a rollback from a corrupt state, or otherwise training that is not deterministic.
        """
        findings = []
        for step, lines in sorted(self.lines.items()):
            if len({line.link for line in lines}) > 1:
                last, odd = lines[-1], next(line for line in lines if line.link != lines[-1].link)
                what = " and ".join(differing(odd, last)) or "history"
                findings.append(
                    CertificateFinding(step=step, what=f"step {step} was committed again, with different {what}")
                )
        return findings

    def check_workers(self) -> list[CertificateFinding]:
        """Return the workers whose history differs from the recorded one, each with the first step that shows it."""
        agreed: dict[int, int] = {}
        findings: dict[int, CertificateFinding] = {}
        for record in self.records:
            if not isinstance(record, StateHashed | Finished) or not record.link or record.rank in findings:
                continue
            if record.link in (self.before(record.step) or {record.link}):
                agreed[record.rank] = record.step
                continue
            since = agreed.get(record.rank, self.first)
            what = f"worker {record.rank} had a state that differs from the records, since some step from {since} to {record.step - 1}"
            findings[record.rank] = CertificateFinding(step=since, what=what)
        return [*findings.values(), *self._other_holders(), *self._other_ends()]

    def _other_holders(self) -> Iterator[CertificateFinding]:
        """Yield the steps before which holders of a part of a split model had different values in it."""
        for (step, part), records in sorted(self._parts.items()):
            if paths := self._odd_holders(records):
                ranks = ", ".join(str(rank) for rank in sorted({record.rank for record in records}))
                what = f"before step {step} workers {ranks}, which hold part {part}, had different values in {', '.join(paths)}"
                yield CertificateFinding(step=step, what=what)

    @staticmethod
    def _odd_holders(records: Sequence[StateHashed]) -> list[str]:
        """Return the tensors of a part in which its holders differ."""
        alike = _alike(records)
        return [path for path in alike[-1].tensors if len({record.tensors.get(path) for record in alike}) > 1]

    def _other_ends(self) -> Iterator[CertificateFinding]:
        ends = self.finished
        if len({(end.sha256, end.state_sha256) for end in ends}) > 1:
            ranks = ", ".join(str(end.rank) for end in ends)
            yield CertificateFinding(
                step=ends[0].step, what=f"step {ends[0].step}: workers {ranks} ended with different states"
            )


def _alike(records: Sequence[StateHashed]) -> list[StateHashed]:
    """Return the hashes that belong to one history according to their links."""
    return [record for record in records if record.link == records[-1].link]


def _link(before: str, line: StepCommitted) -> str:
    return link_of(
        before,
        step=line.step,
        epoch=line.epoch,
        samples=line.samples,
        ids=line.ids,
        figures=line.figures,
        state=line.state,
    )


def differing(one: StepCommitted, other: StepCommitted) -> list[str]:
    """Return the properties in which a step differs: ``samples``, ``state``, ``metrics``, in that order."""
    properties = []
    if (one.epoch, one.samples, one.ids) != (other.epoch, other.samples, other.ids):
        properties.append("samples")
    if (one.state, one.whole) != (other.state, other.whole):
        properties.append("state")
    if one.figures != other.figures:
        properties.append("metrics")
    return properties
