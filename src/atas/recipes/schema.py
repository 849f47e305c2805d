"""The schema of a recipe: its sections with their keys, types and defaults, and the whole `Recipe`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from atas import methods, threat
from atas._utils.imports import GIVEN, is_code, is_timm
from atas.data.sources import display_name, is_function
from atas.errors import UsageError, first_few, nearest, unknown
from atas.methods.weight_perturbation import DEFAULT_GAMMA, FORMS, WeightPerturbation
from atas.recipes.checks import Device, OneOf, Range, check
from atas.recipes.loading import inherit
from atas.recipes.values import format_toml, parse_value

_VIEW_SIZE = 224  # the default of data.view_size
_ALIASES = {"lr": "schedule.peak", "learning_rate": "schedule.peak"}  # names of the key in other programs

_SIMILAR = 0.75  # of a name that another section may have

_LATER_SECTIONS = ("targets", "consistency")  # recipes of earlier versions do not have them

_NO_SECTIONS = ("name", "trusted")  # fields of a recipe
_MAX_EPOCHS = 100_000  # the learning rate of every update is kept on the device

S = TypeVar("S")
_AT_LEAST_1 = Range("must be at least 1", ge=1)
_NOT_NEGATIVE = Range("must not be negative", ge=0)
_POSITIVE = Range("must be above 0", gt=0)
_BELOW_1 = Range("must be in [0, 1)", ge=0, lt=1)


@dataclass(frozen=True)
class DataConfig:
    """The training data. `name` is a name of `atas ls data`, the path of a folder or of an .npz file, `hf:owner/name`,
    or `package.module:function`. `size` is the side of stored images in image folders; a packed set has its own, which
    must agree. `skip_damaged` leaves out images of a folder that cannot be decoded.

    `view` is the random view of an image: `pad`, a crop of the image padded by `pad`; `cropshift`, a box without up to
    `shift` rows and columns (10), shown anywhere in the frame; `crop`, a crop of `view_size` pixels (224); `resized`, a
    box with a share of the image in `view_scale` ((0.08, 1)), resized to `view_size`. With `view_start` and `view_ramp`
    the size rises from `view_start` to `view_size` over the first `view_ramp` of the training. `erase` is the
    probability of an erased rectangle, with a share of the image in `erase_area` ((0.02, 0.33)). Boxes are shifted and
    rectangles erased during the first `view_until` of the training.

    `loading` is the location of the training images: `resident` on the device; `streaming` from files or host memory,
    from which `workers` processes (by default one per CPU core) read ahead; or `auto`, resident if they fit. `shards`
    is the number of shards of the examples, by default one for each rank that starts the run; each rank takes one or
    more. `held_out` is the number of training images that are held out as test images, stratified by class and drawn by
    the seed, for image folders, arrays in files and Hugging Face data sets without test images."""

    name: str = "cifar10"
    root: str | None = None
    size: int | None = None
    pad: Annotated[int, _NOT_NEGATIVE] = 4
    flip: bool | Literal["alternate"] = True
    view: Annotated[str, OneOf("pad", "cropshift", "crop", "resized")] = "pad"
    view_size: int | None = None
    view_start: int | None = None
    view_ramp: Annotated[float | None, Range("is a share of the training in (0, 1]", gt=0, le=1)] = None
    view_scale: tuple[float, float] | None = None
    shift: Annotated[int | None, _NOT_NEGATIVE] = None
    erase: Annotated[float | None, Range("is a probability in [0, 1]", ge=0, le=1)] = None
    erase_area: tuple[float, float] | None = None
    view_until: Annotated[float | None, Range("is a share of the training in (0, 1]", gt=0, le=1)] = None
    loading: Annotated[str, OneOf("auto", "resident", "streaming")] = "auto"
    workers: Annotated[int | None, Range("must be at least 1, or left out", ge=1)] = None
    shards: Annotated[int | None, _AT_LEAST_1] = None
    skip_damaged: bool | None = None
    held_out: Annotated[int | None, _AT_LEAST_1] = None

    @property
    def label(self) -> str:
        """The name of the data for titles: that of the folder or file, if it is one."""
        return display_name(self.name, self.root)

    @property
    def eval_resolution(self) -> int | None:
        """The final side in pixels of the views; None for `pad` and `cropshift`, where it is that of the stored
        images."""
        if self.view in ("pad", "cropshift"):
            return None
        return _VIEW_SIZE if self.view_size is None else self.view_size

    @property
    def frame_pad(self) -> int:
        """Pixels around an image that views may show and perturbations are kept for; `cropshift` shows none of them."""
        return 0 if self.view == "cropshift" else self.pad


@dataclass(frozen=True)
class ModelConfig:
    """The network: a name of `atas ls models`, a network of timm as `timm:resnet50`, or a factory
    `package.module:function`. All other keys are options of a network of timm.

    The training starts from random weights, from the file or run `weights`, or from those that timm downloads
    (`pretrained`). `weights_hash` identifies the weights of a file; the training fills it in."""

    name: str = "preact-resnet18"
    mean: tuple[float, ...] | None = None
    std: Annotated[tuple[float, ...] | None, Range("must be above zero", gt=0)] = None
    weights: str | None = None
    weights_hash: str | None = None
    pretrained: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MethodConfig:
    """The training method, its threat model, and its hyperparameters (all other keys)."""

    name: str = "atas"
    norm: str = "linf"
    eps: float = 8 / 255
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetsConfig:
    """What the training loss compares predictions with: the labels, with a share `smoothing` of the probability spread
    over the classes (`noise` uniform, or random over the other classes), and from `from_epoch` on mixed with a share
    `share` of the moving average, with this `decay`, of the model's predictions for the example. With `teacher_share`
    they are mixed with the predictions of the averaged weights instead (`methods.EMATeacher`)."""

    smoothing: Annotated[float, _BELOW_1] = 0.0
    noise: Annotated[str, OneOf("uniform", "others", "random")] = "uniform"
    share: Annotated[float, Range("must be in [0, 1]", ge=0, le=1)] = 0.0
    decay: Annotated[float, _BELOW_1] = 0.7
    from_epoch: Annotated[int, _NOT_NEGATIVE] = 0
    teacher_share: Annotated[tuple[float, float] | None, Range("must be in [0, 1]", ge=0, le=1)] = None
    teacher_temperature: Annotated[tuple[float, float], _POSITIVE] = (2.5, 2.0)


@dataclass(frozen=True)
class ConsistencyConfig:
    """A term of the training loss: the distance between the predictions at the trained point and at the start of the
    attack, with a `weight` that rises over the first `ramp` of the training. It goes `through` the trained point only,
    or through both by another pass."""

    weight: Annotated[float, _NOT_NEGATIVE] = 0.0
    distance: Annotated[str, OneOf("probabilities", "logits", "mse", "js")] = "probabilities"
    ramp: Annotated[float, Range("is a share of the training in [0, 1]", ge=0, le=1)] = 0.0
    through: Annotated[str, OneOf("trained", "both")] = "trained"


@dataclass(frozen=True)
class OptimizerConfig:
    """Stochastic gradient descent, `adamw` with its `betas` (0.9, 0.999) and `eps` (1e-8), or `muon`, whose orthogonal
    steps of convolutions are `matrix_rate` (0.1) times the learning rate long, relative to the weight. Without
    `decay_norms`, biases, normalisation layers and what the network itself excludes have no weight decay. `clip_norm`
    is the largest norm of the gradient of all weights. `perturb` is a form of weight perturbation
    (`methods.WeightPerturbation`), with the relative length `perturb_gamma` (0.005), from epoch `perturb_from` (0) on,
    and shorter from layer to layer with `perturb_depth_power`."""

    name: Annotated[str, OneOf("sgd", "adamw", "muon")] = "sgd"
    momentum: Annotated[float, _BELOW_1] = 0.9
    weight_decay: Annotated[float, _NOT_NEGATIVE] = 5e-4
    nesterov: bool = False
    betas: Annotated[tuple[float, float] | None, _BELOW_1] = None
    matrix_rate: Annotated[float | None, _POSITIVE] = None
    eps: Annotated[float | None, Range("must be above zero", gt=0)] = None
    decay_norms: bool | None = None
    clip_norm: Annotated[float | None, Range("must be above zero", gt=0)] = None
    perturb: Annotated[str | None, OneOf(*FORMS)] = None
    perturb_gamma: Annotated[float | None, _NOT_NEGATIVE] = None
    perturb_from: Annotated[int | None, _NOT_NEGATIVE] = None
    perturb_depth_power: Annotated[float | None, _POSITIVE] = None

    @property
    def weight_perturbation(self) -> WeightPerturbation | None:
        """The perturbation of the weights in a training step."""
        if self.perturb is None:
            return None
        gamma = DEFAULT_GAMMA if self.perturb_gamma is None else self.perturb_gamma
        return WeightPerturbation(gamma, self.perturb, self.perturb_from or 0, self.perturb_depth_power)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate by update: `piecewise` (drops by `factor` at `milestones`), `cyclic` (up from 0 to `peak`,
    reached at `peak_at`, and down to the share `final` (0) of it), or `cosine` (half a cosine from `peak` to `final`).
    With `warmup`, piecewise and cosine rates rise linearly to `peak` first. Milestones, peak_at and warmup are shares
    of the whole training. With `peak_momentum` the momentum of a cyclic schedule changes from the optimiser's to this
    value at the peak, and back."""

    name: Annotated[str, OneOf("piecewise", "cyclic", "cosine")] = "piecewise"
    peak: Annotated[float, Range("must be above zero", gt=0)] = 0.1
    milestones: Annotated[tuple[float, ...], Range("are shares of the training such as 24/30", gt=0, le=1)] = (
        24 / 30,
        28 / 30,
    )
    factor: Annotated[float, Range("must be in (0, 1]", gt=0, le=1)] = 0.1
    peak_at: Annotated[float, Range("is a share of the training in (0, 1)", gt=0, lt=1)] = 0.5
    peak_momentum: Annotated[float | None, _BELOW_1] = None
    final: Annotated[float | None, Range("is a share of the peak in [0, 1]", ge=0, le=1)] = None
    warmup: Annotated[float | None, Range("is a share of the training in [0, 1), such as 5/30", ge=0, lt=1)] = None


@dataclass(frozen=True)
class TrainingConfig:
    """Length, order and monitoring of the training. `ema` is the decay of averaged weights, 0 for none, or several
    decays, the first of which gives the final model; at update t it is at most (1 + t) / (`ema_warmup` + t) (10; 0 for
    no warm-up). `ema_batchnorm` is for their BatchNorm statistics: average (the default), or re-estimate at the end.
    `probe` is the number of training images that the monitor attacks after every
    epoch, or after every `probe_every` epochs, with the current weights, not their average; auto is 1000, or fewer if
    these would take more than a quarter of the time of the training steps. `checkpoint_every` is in seconds; `loggers`
    are tensorboard (if it is installed) and wandb."""

    epochs: Annotated[int, _AT_LEAST_1, Range(f"must be at most {_MAX_EPOCHS:,}", le=_MAX_EPOCHS)] = 30
    batch_size: Annotated[int, _AT_LEAST_1] = 128
    seed: Annotated[int, Range("must fit 64 bits", ge=-(2**63), lt=2**63)] = 0
    ema: Annotated[float | tuple[float, ...], Range("must be in [0, 1), such as 0.999", ge=0, lt=1)] = 0.0
    ema_warmup: Annotated[float | None, _NOT_NEGATIVE] = None
    ema_batchnorm: Annotated[str | None, OneOf("average", "re-estimate")] = None
    on_collapse: Annotated[str, OneOf("warn", "stop", "rollback")] = "warn"
    probe: Annotated[int | Literal["auto"], Range("must be at least 1 image", ge=1)] = "auto"
    probe_every: Annotated[int | None, Range("must be at least 1 epoch, or left out", ge=1)] = None
    checkpoint_every: Annotated[float, _NOT_NEGATIVE] = 60.0
    loggers: Annotated[tuple[str, ...], OneOf("tensorboard", "wandb")] = ("tensorboard",)

    @property
    def ema_decays(self) -> tuple[float, ...]:
        """The decays of all averages of the weights; empty without one."""
        return self.ema if isinstance(self.ema, tuple) else (self.ema,) if self.ema else ()


@dataclass(frozen=True)
class EngineConfig:
    """How steps are run: `kind` auto (captured on CUDA), eager or captured; `device` auto, cpu or cuda; `precision`
    auto (bf16 on CUDA), bf16 or float32; `deterministic` makes runs on CUDA repeat to the bit, as on the CPU;
    `sync_batchnorm` makes BatchNorm use the global batch if several processes train together."""

    kind: Annotated[str, OneOf("auto", "eager", "captured")] = "auto"
    device: Annotated[str, Device()] = "auto"
    precision: Annotated[str, OneOf("auto", "bf16", "float32")] = "auto"
    deterministic: bool = False
    sync_batchnorm: bool = False


@dataclass(frozen=True)
class EvaluationConfig:
    """The evaluation of `atas evaluate`: attacks, the number of test images (the first ones), and the batch size."""

    attacks: tuple[str, ...] = ("pgd10", "pgd50")
    examples: Annotated[int | None, _AT_LEAST_1] = None
    batch_size: Annotated[int | None, _AT_LEAST_1] = None


@dataclass(frozen=True)
class Recipe:
    """A whole recipe; see the sections."""

    name: str = "unnamed"
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    consistency: ConsistencyConfig = field(default_factory=ConsistencyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    trusted: bool = field(default=True, compare=False, repr=False)
    """False if the recipe is from a folder that may be someone else's: what it names as code is not imported."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def threat(self) -> threat.Threat:
        """The threat model that the method trains against."""
        return threat.create(self.method.norm, self.method.eps)

    @property
    def method_class(self) -> type[methods.Method] | None:
        """The class of the method; None if that is code which may not be imported."""
        if is_code(self.method.name) and not self.trusted:
            return None
        return methods.get(self.method.name, trusted=self.trusted)

    @property
    def given_in_python(self) -> bool:
        """Whether model or data were Python objects, which the command cannot load."""
        return any(name.startswith(GIVEN) for name in (self.model.name, self.data.name))

    @property
    def trust_option(self) -> str:
        """The option, with a space before it, for commands on the run of this recipe: --trust if it names
        code and was trusted, else empty."""
        names_code = is_code(self.model.name) or is_code(self.method.name) or is_function(self.data.name)
        return " --trust" if names_code and self.trusted else ""

    def with_values(self, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe with other values, by dotted keys such as `training.epochs`."""
        document = self.to_dict()
        for key in sorted(
            values, key=lambda key: key not in ("method.name", "model.name")
        ):  # first, as they reset others
            _assign(document, key, values[key])
        return from_dict(document, self.name, trusted=self.trusted)

    def with_trust(self) -> Recipe:
        """Return the recipe as one whose code may be imported."""
        return self if self.trusted else from_dict(self.to_dict(), self.name, trusted=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the sections as dictionaries, without keys that are None, and without a later section or name of an
        optimiser that says nothing."""
        document: dict[str, Any] = {"name": self.name}
        for section, kind in section_types().items():
            if section in _LATER_SECTIONS and getattr(self, section) == kind():
                continue
            values = dataclasses.asdict(getattr(self, section))
            hyperparameters = values.pop("settings", {})
            document[section] = {key: value for key, value in values.items() if value is not None} | hyperparameters
        if self.optimizer.name == OptimizerConfig.name:
            del document["optimizer"]["name"]
        return document

    def to_toml(self) -> str:
        """Return the recipe as TOML, from which the same recipe is loaded."""
        document = self.to_dict()
        lines = [f"name = {format_toml(document.pop('name'))}"]
        for section, entries in document.items():
            lines += ["", f"[{section}]"]
            lines += [f"{key} = {format_toml(value, as_255ths=section == 'method')}" for key, value in entries.items()]
        return "\n".join(lines) + "\n"


def from_dict(document: Mapping[str, Any], name: str, *, trusted: bool = True) -> Recipe:
    """Create a recipe from sections as dictionaries; an unknown key is an error that names the nearest known one."""
    known = section_types()
    values: dict[str, Any] = {"name": parse_value(document.get("name", name), str, "name"), "trusted": trusted}
    for section, entries in document.items():
        if section == "name":
            continue
        if section not in known:
            raise unknown("section of a recipe", section, known)
        if not isinstance(entries, Mapping):
            raise UsageError(f"'{section}' in a recipe is a section: write [{section}] and its keys below")
        values[section] = _parse_section(known[section], section, entries, trusted)
    return Recipe(**values)


@functools.cache
def section_types() -> dict[str, Any]:
    """Return the sections of a recipe with their dataclasses."""
    return {name: kind for name, kind in get_type_hints(Recipe).items() if name not in _NO_SECTIONS}


@functools.cache
def _keys() -> dict[str, dict[str, Any]]:
    """Return the keys of each section with their types."""
    return {name: get_type_hints(kind) for name, kind in section_types().items()}


def _parse_section(kind: type[S], section: str, entries: Mapping[str, Any], trusted: bool) -> S:
    hints = _keys()[section]
    known = [key for key in hints if key != "settings"]
    values: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    entries = dict(sorted(entries.items(), key=lambda entry: entry[0] != "name"))
    hyperparameters = _setting_types(kind, entries, known, trusted)
    for key, value in entries.items():
        if key in known:
            values[key] = parse_value(value, hints[key], f"{section}.{key}")
        elif key in hyperparameters:
            settings[key] = parse_value(value, hyperparameters[key], f"{section}.{key}")
        else:
            raise _unknown_key(section, key, [*known, *hyperparameters])
    if "settings" in hints:
        values["settings"] = settings if kind is MethodConfig else dict(sorted(settings.items()))
    return kind(**values)


def _setting_types(kind: Any, entries: Mapping[str, Any], known: Sequence[str], trusted: bool) -> dict[str, Any]:
    """Return the types of keys beyond the `known` ones: hyperparameters of the method, options of a network of timm.

    `Any` stands for those of timm, and of a method that may not be imported.
    """
    name = str(entries.get("name", ""))
    given = {key: Any for key in entries if key.isidentifier() and key not in known}
    if kind is ModelConfig:
        return given if is_timm(name) else {}
    if kind is not MethodConfig:
        return {}
    if is_code(name) and not trusted:
        return given
    return methods.setting_types(name or MethodConfig.name, trusted=trusted)


def _unknown_key(section: str, key: str, known: Sequence[str]) -> UsageError:
    """Return the error for an unknown key, with the key or the method that was probably meant."""
    users = [
        name for name in methods.names() if section == "method" and key in methods.setting_types(name, trusted=False)
    ]
    meant = None if users else _meant(section, key, known)
    hint = f": that is a setting of {first_few(users)}." if users else f"; did you mean '{meant}'?" if meant else "."
    return UsageError(f"unknown recipe key '{section}.{key}'{hint} Known in [{section}]: {', '.join(known)}.")


def _meant(section: str, key: str, known: Sequence[str]) -> str | None:
    """Return this key of another section, a similar one of this section or of another, or the nearest of this one."""
    elsewhere = _key_elsewhere(key)
    if elsewhere is None and not nearest(key, known, _SIMILAR):
        elsewhere = _key_elsewhere(nearest(key, _homes(), _SIMILAR) or "")
    near = nearest(key, known)
    return elsewhere or (f"{section}.{near}" if near else None)


def _homes() -> dict[str, str]:
    """Return the dotted key of each name of a key; of several sections with this key, the first."""
    return {name: f"{owner}.{name}" for owner, keys in reversed(_keys().items()) for name in keys if name != "settings"}


def _key_elsewhere(name: str) -> str | None:
    """Return the dotted key with this name in any section, or the one that other programs call so."""
    return (_homes() | _ALIASES).get(name)


def _assign(document: dict[str, Any], key: str, value: Any) -> None:
    if not isinstance(key, str):
        raise UsageError(f"the keys of a recipe are texts such as training.epochs; got {key!r}")
    section, _, name = key.partition(".")
    if section not in section_types():
        if nearest(section, section_types()) is None and (meant := _key_elsewhere(name)):
            raise UsageError(f"unknown recipe key '{key}'; did you mean '{meant}'?")
        raise unknown("section of a recipe", section, section_types())
    if name == "name":
        document[section] = inherit(section, document[section], value)
    document.setdefault(section, {})[name] = value
