"""Whether each server serves what the trainer published: `ledger/weights.jsonl`, metrics, the end of a run.

    {"version":7,"server":"http://127.0.0.1:8000","published":272,"verified":272}

- A line is written whenever a server has loaded a version, and when it comes back: `published` tensors, and
  of how many it reports the published digest. A server with data-parallel ranks has a line for each `rank`.
- A tensor that it keeps serving with another digest ends the run, named with version and both digests.
- A server that reports nothing, or only what it read (`as_read`), is said to be unverified, once.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pellucid.data.files import append_whole, read_lines, require_own
from pellucid.errors import WeightsError, printable

log = logging.getLogger(__name__)

WEIGHTS_BOOK = "weights.jsonl"
_MAX_NAMED = 8


class WeightsEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    server: str
    published: int
    verified: int = 0
    as_read: int = 0
    """Tensors of which the server reports the published digest as it read them, not as it serves them."""

    differs: dict[str, tuple[str, str]] = {}
    """Digests as published and as served of the first tensors that differ, by name."""

    rank: int | None = None
    """Data-parallel rank of the server, where it has several."""

    @property
    def where(self) -> str:
        return self.server if self.rank is None else f"{self.server} (rank {self.rank})"


def differing(
    published: Mapping[str, str], served: Mapping[str, str] | None, *, as_read: bool = False
) -> dict[str, tuple[str, str]]:
    """Returns the digests as published and as served of the tensors that differ, by name.

    Served tensors that were not published differ, too; without any published digests, nothing does.
    """
    reported = served or {}
    differs = {
        name: (digest, reported[name])
        for name, digest in published.items()
        if reported.get(name, digest) != digest
    }
    if published and not as_read:  # a head that is no longer tied, for one, keeps what it had
        unpublished = sorted(reported.keys() - published.keys())
        differs |= {name: ("none", reported[name]) for name in unpublished}
    return differs


class WeightsBook:
    def __init__(self, path: Path | None = None) -> None:
        """Without `path`, no file is written."""
        self._path = path
        self._latest: dict[str, WeightsEntry] = {}
        """Last entry of each server, or rank of one."""
        self._said: set[tuple[str, str]] = set()

    def enter(
        self,
        version: int,
        server: str,
        published: Mapping[str, str],
        served: Mapping[str, str] | None,
        *,
        as_read: bool = False,
        rank: int | None = None,
    ) -> None:
        """Compares the digests that a server, or a rank of it, reports by tensor with those published.

        `served` is None for a server that cannot report. Raises WeightsError if a tensor differs, or was not
        published at all.
        """
        differs = differing(published, served, as_read=as_read)
        num_equal = len(published.keys() & (served or {}).keys() - differs.keys())
        entry = WeightsEntry(
            version,
            server,
            len(published),
            verified=0 if as_read else num_equal,
            as_read=num_equal if as_read else 0,
            differs=dict(list(differs.items())[:_MAX_NAMED]),
            rank=rank,
        )
        self._latest[entry.where] = entry
        if self._path is not None:
            _append(self._path, entry)
        if differs:
            raise _other_weights(entry, len(differs))
        self._say_unverified(entry)

    def metrics(self) -> dict[str, float]:
        """Returns what is known of the newest version; nothing before one is served."""
        newest = max((entry.version for entry in self._latest.values()), default=0)
        entries = [entry for entry in self._latest.values() if entry.version == newest]
        if not entries:
            return {}
        num_published = sum(entry.published for entry in entries) or 1
        return {
            "weights/verified": sum(entry.verified for entry in entries) / num_published,
            "weights/verified_as_read": sum(entry.as_read for entry in entries) / num_published,
            "weights/unverified_servers": sum(not entry.verified for entry in entries),
        }

    def _say_unverified(self, entry: WeightsEntry) -> None:
        if entry.verified == entry.published > 0:
            return
        if not entry.published:
            what = (
                "policy version %d carries no digests, so nobody knows whether %s serves it: an older trainer"
            )
            kind = "published"
        elif entry.as_read:
            what = (
                "policy version %d: %s reports what it read, not what it serves: it keeps another form of it"
            )
            kind = "as read"
        elif not entry.verified:
            what = "policy version %d is unverified on %s: it cannot report the digests of what it serves"
            kind = "silent"
        else:
            what = "policy version %d: %s reports the digests of a part of its tensors"
            kind = "part"
        if (entry.server, kind) not in self._said:
            self._said.add((entry.server, kind))
            log.warning(f"{what} (said once)", entry.version, entry.where)


def _append(path: Path, entry: WeightsEntry) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    require_own(path)
    with path.open("ab", buffering=0) as file:
        append_whole(file, msgspec.json.encode(entry) + b"\n")


def _other_weights(entry: WeightsEntry, num_differ: int) -> WeightsError:
    name, (published, served) = next(iter(entry.differs.items()))
    return WeightsError(
        f"the server {entry.where} serves other weights than the trainer published: in policy version "
        f"{entry.version}, {name} has digest {served} there and {published} as published ({num_differ} of "
        f"{entry.published} tensors differ). Restart that server and go on with --resume; if it happens "
        "again, its memory or its loading of weights is faulty: `pellucid verify --only weights`"
    )


class WeightsSummary(msgspec.Struct, frozen=True):
    num_versions: int
    num_verified: int
    """Policy versions that every server which loaded them serves as published, tensor by tensor."""

    servers: list[str]
    unverified: list[WeightsEntry]
    """Last entry of each server and version that is not verified, in order."""

    def line(self) -> str:
        """Returns what a person wants to know first; names come from a file that may be anybody's."""
        return printable(self._line())

    def _line(self) -> str:
        first = next((each for each in self.unverified if each.differs), None)
        if first is not None:
            name, (published, served) = next(iter(first.differs.items()))
            return (
                f"weights: {first.where} served other weights than policy version {first.version}: {name} "
                f"had digest {served}, {published} as published"
            )
        if self.unverified:
            return (
                f"weights: {self.num_verified} of {self.num_versions} policy versions verified; the last "
                f"that is not: {self.unverified[-1].version} on {self.unverified[-1].where}"
            )
        where = "the server" if len(self.servers) == 1 else f"each of {len(self.servers)} servers"
        return f"weights: {self.num_versions} policy versions verified, every tensor as {where} serves it"


def read_weights_book(ledger_dir: Path) -> WeightsSummary | None:
    """Sums up `weights.jsonl`; None if no version was served, or an older pellucid wrote the folder."""
    entries: dict[tuple[int, str, int], WeightsEntry] = {}
    decoder = msgspec.json.Decoder(WeightsEntry)
    for _, line in read_lines(ledger_dir / WEIGHTS_BOOK):
        try:
            entry = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # it is being written, or damaged: nothing is counted from it
        entries[entry.version, entry.server, -1 if entry.rank is None else entry.rank] = entry
    if not entries:
        return None
    unverified = [entry for _, entry in sorted(entries.items()) if not entry.verified == entry.published > 0]
    versions = {version for version, _, _ in entries}
    return WeightsSummary(
        len(versions),
        len(versions - {entry.version for entry in unverified}),
        sorted({server for _, server, _ in entries}),
        unverified,
    )
