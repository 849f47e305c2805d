"""Training methods by name, and their settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import torch

from atas._utils.imports import describe_error, import_object, is_code
from atas.core.arguments import check_argument
from atas.errors import AtasError, UsageError, unknown
from atas.methods.aaer import AAER
from atas.methods.atas import ATAS, ATASLiteral
from atas.methods.atas_plus import ATASPlus
from atas.methods.atta import ATTA
from atas.methods.base import Method
from atas.methods.convergesmooth import FGSMRSCS
from atas.methods.elle import ELLE
from atas.methods.fgsm import FGSM, FGSMRS
from atas.methods.fgsm_ga import FGSMGA
from atas.methods.fgsm_mep_cs import FGSMMEPCS
from atas.methods.fgsm_pco import FGSMPCO
from atas.methods.fgsm_pgi import FGSMPGI
from atas.methods.fgsm_pgk import FGSMPGK
from atas.methods.fgsm_rs_adaptive import FGSMRSAdaptive
from atas.methods.fgsm_uap import FGSMUAP
from atas.methods.free import Free
from atas.methods.gat import GAT
from atas.methods.liet import LIET
from atas.methods.mart import MART
from atas.methods.n_fgsm import NFGSM
from atas.methods.nuat import NuAT
from atas.methods.pgd import PGD
from atas.methods.slat import SLAT
from atas.methods.sora import SORA
from atas.methods.ssat import SSAT
from atas.methods.standard import Standard
from atas.methods.tdat import TDAT
from atas.methods.trades import TRADES
from atas.methods.yopo import YOPO
from atas.methods.zerograd import MultiGrad, ZeroGrad
from atas.threat import Threat

_CLASSES: dict[str, type[Method]] = {
    "standard": Standard,
    "fgsm": FGSM,
    "fgsm-rs": FGSMRS,
    "fgsm-rs-adaptive": FGSMRSAdaptive,
    "fgsm-ga": FGSMGA,
    "ssat": SSAT,
    "free": Free,
    "yopo": YOPO,
    "atta": ATTA,
    "atas": ATAS,
    "atas-literal": ATASLiteral,
    "atas-plus": ATASPlus,
    "pgd": PGD,
    "trades": TRADES,
    "n-fgsm": NFGSM,
    "sora": SORA,
    "zerograd": ZeroGrad,
    "multigrad": MultiGrad,
    "aaer": AAER,
    "elle": ELLE,
    "gat": GAT,
    "nuat": NuAT,
    "fgsm-pgi": FGSMPGI,
    "fgsm-pgk": FGSMPGK,
    "fgsm-uap": FGSMUAP,
    "fgsm-rs-cs": FGSMRSCS,
    "fgsm-mep-cs": FGSMMEPCS,
    "tdat": TDAT,
    "liet": LIET,
    "mart": MART,
    "slat": SLAT,
    "fgsm-pco": FGSMPCO,
}

_COMMON = ("pad", "device", "seed", "targets", "consistency", "classes")  # `atas.train` passes them itself
_DTYPES = {"int8": torch.int8, "float16": torch.float16, "float32": torch.float32}


def names() -> list[str]:
    """Return the names of the built-in methods."""
    return list(_CLASSES)


def get(name: str, *, trusted: bool = True) -> type[Method]:
    """Return the class of a method: one of `names()`, or a class of your own as `package.module:Class`.

    With `trusted=False`, for a name that a file of someone else gives, user code is not imported.
    """
    check_argument("name", name, str)
    if is_code(name):
        method = import_object(name, "method", "class", trusted=trusted)
        if not (isinstance(method, type) and issubclass(method, Method)):
            raise UsageError(f"'{name}' is not a training method: let it inherit from atas.methods.Method.")
        return method
    if name not in _CLASSES:
        raise unknown("method", name, _CLASSES)
    return _CLASSES[name]


def settings(name: str, *, trusted: bool = True) -> dict[str, Any]:
    """Return a method's own settings and their defaults."""
    owners = _owners(get(name, trusted=trusted))
    return {key: inspect.signature(owner).parameters[key].default for key, owner in owners.items()}


def _owners(method: type) -> dict[str, type]:
    """Return the class that declares each setting of a method: its own, or the base class that the method hands it on
    to by an argument such as `**settings: Unpack[ATASArgs]`."""
    owner, *bases = (kind for kind in method.__mro__ if "__init__" in vars(kind))
    parameters = inspect.signature(owner).parameters.values()
    owners = {p.name: owner for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _COMMON}
    rest = next((p for p in parameters if p.kind is p.VAR_KEYWORD), None)
    if rest is not None and (get_origin(rest.annotation) is Unpack or "Unpack[" in str(rest.annotation)):
        handed_on = get_args(_hints(owner)[rest.name])[0].__annotations__
        owners |= {key: base for key, base in _owners(bases[0]).items() if key in handed_on}
    return owners


@functools.cache
def _hints(owner: Any) -> dict[str, Any]:
    try:
        return get_type_hints(owner.__init__)
    except Exception as error:  # annotations are the user's code, and may name what is not imported
        name = f"{owner.__module__}:{owner.__name__}"
        raise UsageError(f"the annotations of method '{name}' cannot be read: {describe_error(error)}.") from error


def takes_classes(name: str, *, trusted: bool = True) -> bool:
    """Return whether `create` needs the number of the model's outputs, as `classes`, for this method."""
    return "classes" in inspect.signature(get(name, trusted=trusted)).parameters


def setting_types(name: str, *, trusted: bool = True) -> dict[str, Any]:
    """Return the type of each of a method's own settings."""
    return {key: _hints(owner).get(key, Any) for key, owner in _owners(get(name, trusted=trusted)).items()}


def create(
    name: str, threat: Threat, examples: int, shape: Sequence[int], *, trusted: bool = True, **hyper: Any
) -> Method:
    """Create a method by name, with its own settings as keywords; `atas ls methods` shows them.

    `package.module:Class` names a method of your own, a subclass of `atas.methods.Method`. `trusted` is as in `get`.

    >>> from atas import Linf
    >>> create("atta", Linf(8/255), examples=100, shape=(3, 32, 32), step_size=4/255).step_size * 255
    4.0
    """
    known = settings(name, trusted=trusted)
    for key in hyper:
        if key not in known and key not in _COMMON:
            raise unknown(f"setting of method {name}", key, [*known, *_COMMON])
    if isinstance(hyper.get("dtype"), str) and hyper["dtype"] != "auto":
        if hyper["dtype"] not in _DTYPES:
            raise unknown("dtype of the memory", hyper["dtype"], _DTYPES)
        hyper["dtype"] = _DTYPES[hyper["dtype"]]
    try:
        return get(name, trusted=trusted)(threat, examples, shape, **hyper)
    except TypeError as error:
        raise UsageError(f"method {name} cannot take these settings {hyper}: {error}") from error
    except AtasError:
        raise
    except Exception as error:
        if not is_code(name):
            raise
        raise UsageError(f"'{name}' failed to make a method: {describe_error(error)}.") from error
