"""What becomes of the optimizers of published packages: those that are rewritten, and why the others are not.

tests/optimizers/test_packages.py shows that it is so; docs/development/coverage.md prints it. The versions are those of
the group `test`.
"""

from __future__ import annotations

READS = "leaves what it is by values"
CONTAINER = "keeps tensors in a container"
CLOSURE = "needs a closure"
SECOND_BACKWARD = "differentiates again"
OTHER_SHAPE = "tensors of another shape"
NOT_FLOATING = "states of whole numbers"
ORDER = "norm of another order"
OTHER_TYPE = "computes in another type"
MEMORY = "has the memory of a value"
DRAWS = "draws random numbers"
PAIRS = "updates pairs of parameters only"

MEANING: dict[str, str] = {
    READS: "what it does to parameters changes with what it reads from them in most of its steps",
    CONTAINER: "a list or a dictionary has tensors of one step in the next",
    OTHER_SHAPE: "factors, preconditioners, statistics of blocks: computed of matrices",
    CLOSURE: "evaluates the closure several times in a step",
    SECOND_BACKWARD: "takes second derivatives in `step()`",
    NOT_FLOATING: "integers or booleans in `state[p]`, shaped like the parameter: no format stores them exactly",
    "`aten...`": "an operation that is not elementwise, has no rule yet, or draws",
    ORDER: "a norm that is neither the sum of magnitudes nor the root of the sum of squares",
    OTHER_TYPE: "casts to bf16, float64 or integers: updates are compiled in fp32",
    MEMORY: "asks a tensor for its memory, or a library does for it",
    PAIRS: "does nothing to a parameter alone",
}
"""What the short reasons mean, for the page."""

NOTES = {"Fira": "without `rank`", "GaLore": "without `rank`"}
"""Rewritten with the default options; not with the one that the optimizer is known for."""

COVERED: dict[str, str] = {
    "lion_pytorch": "Lion",
    "adan_pytorch": "Adan",
    "schedulefree": (
        "AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference RAdamScheduleFree "
        "SGDScheduleFree SGDScheduleFreeReference"
    ),
    "torch_optimizer": (
        "AdaBelief AdaBound AdaMod DiffGrad LARS MADGRAD NovoGrad PID QHAdam QHM RAdam Ranger RangerQH "
        "RangerVA SGDW Yogi"
    ),
    "pytorch_optimizer": (
        "ADOPT APOLLO AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaMax AdaMod AdaPNM AdaSmooth Adam AdamC "
        "AdamG AdamW AdamWSN Adan Aida Ano BCOS CAME DiffGrad DualAdam EXAdam EmoFact EmoLynx EmoNavi FOCUS "
        "FTRL Fira GaLore Grams GrokFastAdamW Kate LaProp Lion MADGRAD MARS MSVAG NAdam NovoGrad PAdam PID "
        "PNM QHM RACS RAdam RMSprop Ranger SGD SGDW SRMM ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD "
        "SignSGD SimplifiedAdEMAMix StableAdamW Tiger VSGD Yogi"
    ),
}
"""Optimizers that agree with their float64 run."""

LAUNCHED: dict[str, str] = {
    "lion_pytorch": "",
    "adan_pytorch": "",
    "schedulefree": "",
    "torch_optimizer": "A2GradExp A2GradInc A2GradUni AccSGD Adafactor AdamP Lamb SGDP",
    "pytorch_optimizer": (
        "ASGD AdaGC Adai AdamP AdamS AliG Amos AvaGrad DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion "
        "DAdaptSGD FAdam Fromage LARS Lamb Magma Nero Prodigy QHAdam SGDP SGDSaI"
    ),
}
"""Optimizers that are compiled too, and read values, or add up over several parameters.

They are as near to their fp32 run as roundings are (tests/eager/test_packages.py).
"""

STAGED: dict[str, set[str]] = {package: set() for package in COVERED} | {
    "torch_optimizer": {"NovoGrad"},
    "pytorch_optimizer": {
        "Aida", "Amos", "CAME", "EmoFact", "FAdam", "LARS", "MARS", "NovoGrad", "RACS", "Ranger", "StableAdamW",
    },
}  # fmt: skip
"""Those of them that take sums, means or norms of whole tensors, and are captured in stages."""

REFUSED: dict[str, dict[str, str]] = {
    "lion_pytorch": {},
    "adan_pytorch": {},
    "schedulefree": {
        **dict.fromkeys(("AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure"), CLOSURE)
    },
    "torch_optimizer": {
        "Shampoo": "aten.transpose_",
        "AggMo": CONTAINER,
        "Apollo": ORDER,
        "SWATS": READS,
        "Adahessian": SECOND_BACKWARD,
    },
    "pytorch_optimizer": {
        "Conda": "aten._linalg_svd",
        "SM3": "aten.detach",
        **dict.fromkeys(("AdaTAM", "TAM"), "aten.linalg_vector_norm"),
        "Adalite": "aten.mean",
        "Gravity": "aten.normal_",
        "Kron": DRAWS,
        "Alice": "aten.sort",
        "Shampoo": "aten.transpose_",
        "LBFGS": CLOSURE,
        **dict.fromkeys(("AdaShift", "AggMo", "ScalableShampoo"), CONTAINER),
        "SOAP": MEMORY,
        **dict.fromkeys(("SPAM", "SaRA"), NOT_FLOATING),
        "ApolloDQN": ORDER,
        "SPlus": OTHER_SHAPE,
        **dict.fromkeys(
            ("AdaFactor", "DASH", "FlashAdamW", "ROSE", "SCION", "SCIONLight", "SpectralSphere", "StableSPAM"),
            OTHER_TYPE,
        ),
        "LoRARite": PAIRS,
        **dict.fromkeys(("A2Grad", "AdaNorm", "SWATS"), READS),
        **dict.fromkeys(("AdaHessian", "SophiaH"), SECOND_BACKWARD),
    },
}
"""Optimizers that are not compiled, and why in short."""

REJECTED: dict[str, dict[str, str]] = {
    "lion_pytorch": {},
    "adan_pytorch": {},
    "schedulefree": {},
    "torch_optimizer": {"Adahessian": SECOND_BACKWARD},
    "pytorch_optimizer": {**dict.fromkeys(("AdaHessian", "SophiaH"), SECOND_BACKWARD)},
}
"""Of those, the ones that cannot run as written on fp32 values either (tests/eager/test_packages.py)."""
