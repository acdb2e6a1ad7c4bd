"""The model store: a folder of verified sources and complete artifacts, safe to share between processes.

    <root>/<family>/source/            the files of one source and `source.json`, what they are and where from
    <root>/<family>/<variant>/         one artifact and its `manifest.json`
    <root>/<family>/trusted.json       digests that were trusted on first use, and must match ever after
    <root>/<family>/.partial/          downloads under way; the next attempt goes on from them

`source/` and artifacts appear by one rename, after everything in them is on the disk: whoever sees one sees all of it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from models.catalogue.families import Catalogue, Family, Source, Variant, load_catalogue
from models.store import disk, fetch
from models.store.fetch import Progress, Silence
from models.store.manifest import MANIFEST_FILE, Listing, read_regular, verify_files
from models.store.sources import Trusted, bring
from router.base.errors import ArtifactError, ArtifactMissing
from router.base.json_input import UNREADABLE

if TYPE_CHECKING:
    from models.formats.weights import Weights

ROOT_VARIABLE = "OVERSPILL_MODELS"
_RECORD_FILE = "source.json"
_TRUSTED_FILE = "trusted.json"


class StoredFile(msgspec.Struct, frozen=True):
    """What was placed: a change of size or time asks for its digest again."""

    sha256: str
    size_bytes: int
    changed_ns: int


class SourceRecord(msgspec.Struct, frozen=True):
    """Where a family's files came from.

    Attributes:
        revision: the hub commit they belong to, empty elsewhere.
        pinned: every digest is from the catalogue; else some were trusted on first use.
    """

    uri: str
    files: dict[str, StoredFile]
    revision: str = ""
    pinned: bool = False


def where(root: Path) -> str:
    """Name a store for an error about what it lacks; say how it was chosen where nobody chose it."""
    if os.environ.get(ROOT_VARIABLE) or root != default_root():
        return f"the store {root}"
    made = Path.cwd() / ".overspill" / "models"
    hint = f"; `make` has put models into {made}: export {ROOT_VARIABLE}={made}" if made.is_dir() else ""
    return f"the store {root} ({ROOT_VARIABLE} is not set, so the default was taken{hint})"


def default_root() -> Path:
    """Return $OVERSPILL_MODELS, else `~/.cache/overspill/models`."""
    named = os.environ.get(ROOT_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "overspill" / "models"


class ModelStore:
    """One store.

    Attributes:
        root: its folder; made when something is placed.
        catalogue: says what belongs into it.
    """

    def __init__(self, root: Path | None = None, catalogue: Catalogue | None = None) -> None:
        self.root = root or default_root()
        self.catalogue = catalogue if catalogue is not None else load_catalogue()

    def source_path(self, family: str | Family) -> Path:
        """Return a family's GGUF file or Hugging Face directory. Files that changed since are digested again.

        Raises:
            ModelNotFound: there is no such family.
            ArtifactError: it was not pulled, or is damaged; names the command that pulls it.
        """
        family = self._family(family)
        in_place = _in_place(family)
        if in_place is not None:
            return in_place
        record = self.source_record(family)
        folder = self._folder(family) / "source"
        touched = {}
        for name, stored in record.files.items():
            problem, changed_ns = _examine(folder / name, stored)
            if problem:
                raise ArtifactError(f"{problem}; run: overspill models pull {family.name} --force")
            if changed_ns != stored.changed_ns:
                touched[name] = msgspec.structs.replace(stored, changed_ns=changed_ns)
        if touched:  # the store was copied; the digests held, so need not be computed at the next start
            with suppress(OSError):
                record = msgspec.structs.replace(record, files={**record.files, **touched})
                _write_record(folder / _RECORD_FILE, record)
        return folder if len(record.files) > 1 else folder / next(iter(record.files))

    def source_record(self, family: str | Family) -> SourceRecord:
        """Return where a family's files came from.

        Raises:
            ArtifactError: it was not pulled.
        """
        family = self._family(family)
        path = self._folder(family) / "source" / _RECORD_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=SourceRecord)
        except OSError as error:
            raise ArtifactMissing(
                f"`{family.name}` is not in {where(self.root)}; run: overspill models pull {family.name}"
            ) from error
        except UNREADABLE as error:
            raise ArtifactError(f"{path}: damaged; run: overspill models pull {family.name} --force") from error

    def source_sha256(self, family: str | Family) -> str:
        """Return one digest for all of a family's source files: the file's own, or that of the list of digests.

        Raises:
            ArtifactError: it was not pulled.
        """
        family = self._family(family)
        in_place = _in_place(family)
        if in_place is not None:
            digests = {path.name: fetch.sha256_of(path) for path in sorted(in_place.glob("*.safetensors"))}
        else:
            digests = {name: stored.sha256 for name, stored in self.source_record(family).files.items()}
        if len(digests) == 1:
            return next(iter(digests.values()))
        return fetch.sha256_of_text("".join(f"{digests[name]}  {name}\n" for name in sorted(digests)))

    def weights(self, variant: str) -> Weights:
        """Open a variant's float32 weights: the family's source, less the layers the variant drops.

        Raises:
            ModelNotFound, ArtifactError: it is unknown, or was not pulled.
        """
        from models.formats.weights import open_weights  # noqa: PLC0415 — edge devices run artifacts and skip this

        chosen = self.catalogue.variant(variant)
        return open_weights(self.source_path(chosen.family), chosen.layers)

    def artifact_dir(self, variant: str | Variant) -> Path:
        """Return the folder of a complete artifact.

        Raises:
            ModelNotFound: there is no such variant.
            ArtifactError: it was not made here, or a file of it is missing or cut short; names the command to run.
        """
        return self._checked(self._variant(variant), digest=False)

    def check_artifact(self, variant: str | Variant) -> None:
        """Digest every file of an artifact against its manifest.

        Raises:
            ArtifactError: one differs.
        """
        self._checked(self._variant(variant), digest=True)

    def _checked(self, variant: Variant, *, digest: bool) -> Path:
        folder = self.root / variant.family / variant.name
        remedy = f"run: overspill models pull {variant.family} --prepare"
        try:
            listing = msgspec.json.decode(read_regular(folder / MANIFEST_FILE), type=Listing)
        except OSError as error:
            raise ArtifactMissing(f"no artifact of `{variant.name}` in {where(self.root)}; {remedy}") from error
        except UNREADABLE as error:
            raise ArtifactError(f"{folder / MANIFEST_FILE}: damaged ({error}); {remedy} --force") from error
        verify_files(folder, listing.files, f"{remedy} --force", digest=digest)
        return folder

    @contextmanager
    def placing(self, variant: str | Variant, needed_bytes: int = 0) -> Iterator[Path]:
        """Give an empty folder to fill; at the end of the block it becomes the artifact, in one rename.

        The block must write `manifest.json`. If it raises, nothing is placed. Two processes that make the same
        artifact take turns.

        Args:
            needed_bytes: what the block will write, 0 if unknown.

        Raises:
            ArtifactError: there is no room for it, or the disk fails meanwhile; what was there before stays.
        """
        chosen = self._variant(variant)
        home = self.root / chosen.family
        with (
            disk.disk_errors(home, needed_bytes),
            _lock(home, f".{chosen.name}.lock", Silence()),
            _staging(home, chosen.name) as staging,
        ):
            disk.need_space(home, needed_bytes)
            yield staging
            if not (staging / MANIFEST_FILE).is_file():
                raise ArtifactError(f"the artifact of `{chosen.name}` was made without {MANIFEST_FILE}")
            _place(staging, home / chosen.name)

    def pull(self, family: str | Family, progress: Progress | None = None, *, force: bool = False) -> Path:
        """Bring a family's source into the store and return its path; nothing is fetched if it is there and whole.

        Args:
            force: fetch it again.

        Raises:
            ModelNotFound: there is no such family.
            ArtifactError: no source could be had; lists why, source by source.
        """
        family = self._family(family)
        watcher = progress or Silence()
        home = self._folder(family)
        with suppress(ArtifactError):
            if not force:
                return self.source_path(family)
        with disk.disk_errors(home), _lock(home, ".lock", watcher):
            if not force:  # another process may have brought it meanwhile
                with suppress(ArtifactError):
                    return self.source_path(family)
            failures = []
            for source in family.sources:
                try:
                    with disk.disk_errors(home):
                        self._bring(home, source, watcher)
                except ArtifactError as error:
                    failures.append(f"{source.uri}: {error.message}")
                    watcher.note(failures[-1])
                    continue
                return self.source_path(family)
        listed = "".join(f"\n  {index}. {failure}" for index, failure in enumerate(failures, 1))
        raise ArtifactError(f"no source of `{family.name}` could be had:{listed}")

    def _bring(self, home: Path, source: Source, progress: Progress) -> None:
        trusted = Trusted(home / _TRUSTED_FILE)
        partial = home / ".partial" / fetch.sha256_of_text(source.uri)[:16]
        partial.mkdir(parents=True, exist_ok=True)
        files = bring(source, partial, trusted, progress)
        with _staging(home, "source") as staging:
            stored = {}
            for file in files:
                file.path.replace(staging / file.path.name)
                seen = (staging / file.path.name).stat()
                stored[file.path.name] = StoredFile(file.sha256, seen.st_size, seen.st_mtime_ns)
            revision = next((file.commit for file in files if file.commit), "")
            record = SourceRecord(source.uri, stored, revision, pinned=all(file.pinned for file in files))
            _write_record(staging / _RECORD_FILE, record)
            trusted.save()
            _place(staging, home / "source")
        shutil.rmtree(home / ".partial", ignore_errors=True)

    def _family(self, family: str | Family) -> Family:
        return self.catalogue.family(family) if isinstance(family, str) else family

    def _variant(self, variant: str | Variant) -> Variant:
        return self.catalogue.variant(variant) if isinstance(variant, str) else variant

    def _folder(self, family: Family) -> Path:
        return self.root / family.name


def _in_place(family: Family) -> Path | None:
    source = family.sources[0]
    if source.scheme != "dir":
        return None
    path = Path(source.uri.removeprefix("dir:")).expanduser()
    if not (path / "config.json").is_file():
        raise ArtifactError(f"`{family.name}`: {path} has no config.json; it must be a Hugging Face directory")
    return path


def _examine(path: Path, stored: StoredFile) -> tuple[str, int]:
    """Say what is wrong with a stored file, nothing if it is whole, and when it changed."""
    try:
        seen = path.stat()
    except OSError as error:
        return f"{path}: {error.strerror}", 0
    if seen.st_size != stored.size_bytes:
        return f"{path}: {seen.st_size} bytes instead of {stored.size_bytes}", 0
    if seen.st_mtime_ns != stored.changed_ns and fetch.sha256_of(path) != stored.sha256:
        return f"{path}: its sha256 has changed", 0
    return "", seen.st_mtime_ns


def _write_record(path: Path, record: SourceRecord) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    part.replace(path)


@contextmanager
def _lock(home: Path, name: str, progress: Progress) -> Iterator[None]:
    """Hold an advisory lock; the kernel frees it when its holder dies."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        file = (home / name).open("wb")
    except OSError as error:
        if error.errno in disk.FULL:
            raise
        raise ArtifactError(f"cannot write to the store {home}: {error.strerror}; see {ROOT_VARIABLE}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note(f"{home.name}: another process is at it; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _staging(home: Path, name: str) -> Iterator[Path]:
    """Give a new folder under the caller's lock, and remove it, and any that a killed process left, at the end."""
    prefix = f".{name}.staging-"
    for leftover in home.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=home))
    staging.chmod(0o755)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _place(staging: Path, final: Path) -> None:
    """Make everything durable, then let it appear; what was there before goes away as a whole."""
    for path in (*staging.rglob("*"), staging):
        _sync(path)
    if final.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{final.name}.staging-", dir=final.parent))
        final.replace(old / final.name)
        staging.replace(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        staging.replace(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
