"""Training methods, one per file. `create` makes one by name."""

from atas.data.loader import Batch
from atas.methods.aaer import AAER
from atas.methods.atas import ATAS, AdaptiveStepSizes, ATASLiteral
from atas.methods.atas_plus import ATASPlus
from atas.methods.atta import ATTA
from atas.methods.base import InputPerturbation, Method, PersistentPerturbation, StepOutput
from atas.methods.consistency import Consistency
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
from atas.methods.registry import create, get, names, setting_types, settings, takes_classes
from atas.methods.slat import SLAT
from atas.methods.sora import SORA
from atas.methods.ssat import SSAT
from atas.methods.standard import Standard
from atas.methods.targets import LabelTargets, RememberedPredictions
from atas.methods.tdat import TDAT
from atas.methods.teacher import EMATeacher
from atas.methods.trades import TRADES
from atas.methods.update import OptimizerUpdate, Update
from atas.methods.weight_perturbation import WeightPerturbation
from atas.methods.yopo import YOPO
from atas.methods.zerograd import MultiGrad, ZeroGrad

__all__ = [
    "AAER",
    "ATAS",
    "ATTA",
    "ELLE",
    "FGSM",
    "FGSMGA",
    "FGSMMEPCS",
    "FGSMPCO",
    "FGSMPGI",
    "FGSMPGK",
    "FGSMRS",
    "FGSMRSCS",
    "FGSMUAP",
    "GAT",
    "LIET",
    "MART",
    "NFGSM",
    "PGD",
    "SLAT",
    "SORA",
    "SSAT",
    "TDAT",
    "TRADES",
    "YOPO",
    "ATASLiteral",
    "ATASPlus",
    "AdaptiveStepSizes",
    "Batch",
    "Consistency",
    "EMATeacher",
    "FGSMRSAdaptive",
    "Free",
    "InputPerturbation",
    "LabelTargets",
    "Method",
    "MultiGrad",
    "NuAT",
    "OptimizerUpdate",
    "PersistentPerturbation",
    "RememberedPredictions",
    "Standard",
    "StepOutput",
    "Update",
    "WeightPerturbation",
    "ZeroGrad",
    "create",
    "get",
    "names",
    "setting_types",
    "settings",
    "takes_classes",
]
