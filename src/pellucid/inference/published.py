"""The weights that a pool has its servers serve, and whether they serve them as published.

A server that has loaded weights reports their digests, and so does one that comes back. It takes two reports
against the same digests to be certain that it serves other weights, which ends the run: a trainer that was
resumed may have published the version anew, and its digests come here a moment later than the weights come
to the server. In between, the list of what the trainer offers has to be asked for anew; an answer that was
under way does not count.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from pellucid.errors import InferenceError, TransportError
from pellucid.inference.client import ServedWeightsReport, UnreachableError
from pellucid.ledger.weights import WeightsBook, differing
from pellucid.transport.digests import read_digests


class WeightsToServe:
    def __init__(self, run: str, book: WeightsBook, num_listed: Callable[[], float]) -> None:
        """`num_listed`: how often the folders of weights were made what the trainer offers; infinite where
        they are its own."""
        self._run, self._book, self._num_listed = run, book, num_listed
        self.current: tuple[int, Path] | None = None
        """Policy version and folder; None before the first."""
        self._digests: Mapping[str, str] = {}
        self._doubts: dict[str, tuple[int, Mapping[str, str], float]] = {}
        """By server, or rank of one, that served other weights at its last report: the policy version, the
        digests that were compared, and how often the list of versions has to have been followed until they
        count."""

    def set(self, version: int, folder: Path) -> None:
        self._digests = _published_digests(folder)
        self.current = version, folder

    def verify(self, server: str, version: int, folder: Path, report: ServedWeightsReport | None) -> None:
        """Enters a server's report into the book; raises WeightsError if it is certain to serve others."""
        parts: dict[int | None, Mapping[str, str] | None] = {None: None}
        as_read = False
        if report is not None:
            as_read = report.as_read
            parts = {each.rank: each.digests for each in report.ranks} or {None: report.digests}
            versions = {each.policy_version for each in report.ranks} or {report.policy_version}
            if (versions, report.run) != ({version}, self._run):
                served = " and ".join(map(str, sorted(versions)))
                raise UnreachableError(
                    f"{server} serves policy version {served} of run {report.run!r} by now"
                )
        if self.current != (version, folder):
            return  # newer weights came meanwhile, and with them another examination
        for rank, digests in parts.items():
            where = server if rank is None else f"{server} (rank {rank})"
            if differs := differing(self._digests, digests, as_read=as_read):
                self._require_certainty(where, version, folder, *next(iter(differs.items())))
            self._doubts.pop(where, None)
        for rank, digests in parts.items():
            self._book.enter(version, server, self._digests, digests, as_read=as_read, rank=rank)

    def _require_certainty(
        self, server: str, version: int, folder: Path, name: str, digests: tuple[str, str]
    ) -> None:
        """Raises InferenceError unless this is the second report against the same digests. `digests`: those
        of the tensor `name`, as published and as served."""
        doubt, published = self._doubts.pop(server, None), _published_digests(folder)
        if not published:
            raise InferenceError(f"policy version {version} was withdrawn meanwhile")
        if published != self._digests:
            self._digests = published
            raise InferenceError(f"policy version {version} was published anew meanwhile")
        num_listed = self._num_listed()
        if doubt is not None and doubt[:2] == (version, published):
            if num_listed >= doubt[2]:
                return
            self._doubts[server] = doubt
        else:
            self._doubts[server] = version, published, num_listed + 2
        raise UnreachableError(
            f"{server} is examined again: in policy version {version}, {name} has digest {digests[1]} there "
            f"and {digests[0]} as published, unless it was published anew"
        )


def _published_digests(folder: Path) -> Mapping[str, str]:
    """Returns the digests of a policy version; none if it has none, or is gone by now.

    Raises InferenceError if they cannot be read: they may be just about to go, so whoever serves tries again.
    """
    try:
        digests = read_digests(folder)
    except TransportError as error:
        raise InferenceError(str(error)) from error
    return {} if digests is None else digests.tensors
