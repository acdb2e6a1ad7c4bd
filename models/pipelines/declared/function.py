"""A stage of the operator's own: a function, or a class whose instances are called, by import path."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.pipelines.declared.contract import ArrayWork, Contract, fault
from models.pipelines.declared.settings import StageSettings
from router.base.errors import ConfigError, in_words


@dataclass(frozen=True, slots=True)
class Function:
    """`module:name`: called with a dictionary of arrays, returns one; see `contract.ArrayWork`.

    A class is made once for each instance of the stage, with the stage's `options` as its one argument.
    """

    pipeline: str
    stage: str
    path: str
    options: Mapping[str, Any]
    contract: Contract
    shared: bool = False

    def open(self) -> ArrayWork:
        """Import it, and make the object of a class.

        Raises:
            ConfigError: there is none that can be called with a batch; says how to correct it.
        """
        found = self.found()
        if not inspect.isclass(found):
            own: ArrayWork = found
            return own
        made: Any = found
        try:
            made = made(dict(self.options))
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise fault(self.pipeline, self.stage, f"`{self.path}` cannot be made: {in_words(error)}") from error
        work: ArrayWork = made
        return work

    def found(self) -> Any:
        """Import it; raises ConfigError."""
        module, _, name = self.path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except ModuleNotFoundError as error:
            raise self.missing(error.name or module) from error
        except AttributeError as error:
            raise fault(self.pipeline, self.stage, f"`{self.path}`: `{module}` has no `{name}`") from error
        except (Exception, SystemExit) as error:
            raise fault(
                self.pipeline, self.stage, f"`{self.path}` fails as it is imported: {in_words(error)}"
            ) from error
        self._check(found)
        return found

    def missing(self, module: str) -> ConfigError:
        """Return the error for a module that is not there."""
        what = f"`{self.path}`: {module} cannot be imported: install it, or add its folder to PYTHONPATH"
        return fault(self.pipeline, self.stage, what)

    def _check(self, found: Any) -> None:
        """Raises ConfigError where it cannot be called with one argument."""
        is_class = inspect.isclass(found)
        called = vars(found).get("__call__") if is_class else found
        arguments: tuple[Any, ...] = (found, {}) if is_class else ({},)
        try:
            if not callable(called):
                raise TypeError("it cannot be called")  # noqa: TRY301
            inspect.signature(called).bind(*arguments)
        except TypeError as error:
            raise fault(
                self.pipeline,
                self.stage,
                f"`{self.path}` must take one argument, a dictionary of arrays: {error}",
            ) from None
        if self.options and not is_class:
            raise fault(
                self.pipeline, self.stage, f"`options` go to a class, and `{self.path}` is a function: leave them out"
            )


def function(pipeline: str, settings: StageSettings) -> Function:
    """Make the kind of a stage that names `module:name`; imports it where its pool are threads.

    Raises:
        ConfigError: it is not there, or its contract is not told.
    """
    if not settings.inputs or not settings.outputs:
        raise fault(
            pipeline,
            settings.name,
            "a function of your own says what it takes and gives: write inputs and outputs, each "
            '[{ name = "…", datatype = "FP32", shape = [-1] }]',
        )
    made = Function(
        pipeline, settings.name, settings.use, settings.options, Contract(settings.inputs, settings.outputs)
    )
    if settings.pool == "threads":
        made.found()  # told now rather than with the first load
    elif importlib.util.find_spec(settings.use.partition(":")[0].partition(".")[0]) is None:
        raise made.missing(settings.use.partition(":")[0])  # the rest is seen in its own process, as it is loaded
    return made
