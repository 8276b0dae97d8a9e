"""What becomes of the optimizers of published packages: those that are rewritten, and why the others are not.

tests/optimizers/test_packages.py shows that it is so; docs/development/coverage.md prints it. The versions are those of
the group `test`.
"""

from __future__ import annotations

READS = "reads a tensor's value"
CONTAINER = "keeps tensors in a container"
CLOSURE = "needs a closure"
NO_PARAMETER = "keeps state of no parameter"
SECOND_BACKWARD = "differentiates again"
META = "cannot run without data"
OTHER_SHAPE = "tensors of another shape"
INNER = "steps another optimizer"
NOT_FLOATING = "states of whole numbers"
ORDER = "norm of another order"
NUMBER = "keeps a number from tensors"
OVER_ALL = "adds up over all parameters"
HALF = "makes a state in bf16 beside fp32"

MEANING: dict[str, str] = {
    READS: "`if tensor`, `float()`, `.item()` kept: a trust ratio, a learning rate estimated from the data, a warning",
    CONTAINER: "a list or dict in `state[p]`: nothing identifies its tensors from one step to the next",
    OTHER_SHAPE: "row and column means, statistics by group or tensor",
    CLOSURE: "evaluates the closure several times in a step",
    NO_PARAMETER: '`optimizer.state["k"]`; keep the number in the group or in an attribute instead',
    SECOND_BACKWARD: "takes second derivatives in `step()`",
    META: (
        "looks at values without need: copies them to another device, or indexes by them. Another package's "
        "optimizer of the same name is other code, and may compile"
    ),
    INNER: "compile the inner optimizer instead",
    NOT_FLOATING: "integers or booleans in `state[p]`, shaped like the parameter: no format stores them exactly",
    "`aten...`": "an operation that is not elementwise, or has no rule yet",
    ORDER: "a norm that is neither the sum of magnitudes nor the root of the sum of squares",
    OVER_ALL: "a step of one parameter depends on the others",
    NUMBER: "a 0-d state that is computed from the gradient",
    HALF: "a state of the shape of the parameter is bf16 where that is fp32",
}
"""What the short reasons mean, for the page."""

NOTES = {"Fira": "without `rank`", "GaLore": "without `rank`"}
"""Rewritten with the default options; not with the one that the optimizer is known for."""

COVERED: dict[str, str] = {
    "lion_pytorch": "Lion",
    "adan_pytorch": "Adan",
    "schedulefree": (
        "AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference RAdamScheduleFree SGDScheduleFree "
        "SGDScheduleFreeReference"
    ),
    "torch_optimizer": (
        "AccSGD AdaBelief AdaBound AdaMod DiffGrad LARS MADGRAD PID QHAdam QHM RAdam Ranger RangerQH RangerVA SGDW Yogi"
    ),
    "pytorch_optimizer": (
        "ADOPT APOLLO AccSGD AdEMAMix AdaBelief AdaDelta AdaMax AdaPNM AdaSmooth Adam AdamC AdamG AdamW AdamWSN "
        "Adan Aida Amos "
        "Ano BCOS CAME DiffGrad DualAdam EXAdam FAdam FOCUS FTRL Fira GaLore Grams GrokFastAdamW Kate LARS LaProp Lion "
        "LoRARite MSVAG NAdam NovoGrad PAdam PID PNM QHM RAdam RMSprop Ranger SGD SGDW SRMM ScheduleFreeAdamW "
        "ScheduleFreeRAdam ScheduleFreeSGD SignSGD SimplifiedAdEMAMix StableAdamW Tiger VSGD Yogi"
    ),
}
"""Optimizers that agree with their float64 run, each element within its derived bound."""

STAGED: dict[str, set[str]] = {package: set() for package in COVERED} | {
    "pytorch_optimizer": {"Aida", "Amos", "CAME", "FAdam", "LARS", "NovoGrad", "Ranger", "StableAdamW"},
}
"""Those of them that take sums, means or norms of whole tensors, and are captured in stages."""

REFUSED: dict[str, dict[str, str]] = {
    "lion_pytorch": {},
    "adan_pytorch": {},
    "schedulefree": dict.fromkeys(
        ("AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure"), CLOSURE
    ),
    "torch_optimizer": {
        "Apollo": ORDER,
        "NovoGrad": NUMBER,
        "Shampoo": META,
        "Adahessian": SECOND_BACKWARD,
        "AggMo": CONTAINER,
        **dict.fromkeys(("A2GradExp", "A2GradInc", "A2GradUni", "AdamP", "Lamb", "SGDP", "SWATS"), READS),
        "Adafactor": OTHER_SHAPE,
    },
    "pytorch_optimizer": {
        "Conda": "aten._linalg_svd",
        **dict.fromkeys(("QHAdam", "SCION", "SCIONLight", "SM3", "ScalableShampoo", "Shampoo"), OTHER_SHAPE),
        **dict.fromkeys(("AdaTAM", "TAM"), "aten.linalg_vector_norm"),
        "ApolloDQN": ORDER,
        "StableSPAM": NUMBER,
        "Adai": OVER_ALL,
        **dict.fromkeys(("Adalite", "ROSE"), "aten.mean"),
        "Gravity": "aten.normal_",
        **dict.fromkeys(("FlashAdamW", "SPAM", "SaRA"), NOT_FLOATING),
        **dict.fromkeys(("AdaBound", "AdaMod"), META),
        **dict.fromkeys(("AdaHessian", "SophiaH"), SECOND_BACKWARD),
        **dict.fromkeys(("EmoFact", "EmoLynx", "EmoNavi", "MADGRAD"), NO_PARAMETER),
        **dict.fromkeys(("AdaShift", "AggMo", "DASH", "Kron", "SOAP", "SPlus"), CONTAINER),
        **dict.fromkeys(("AliG", "LBFGS"), CLOSURE),
        **dict.fromkeys(
            (
                "A2Grad",
                "ASGD",
                "AdaFactor",
                "AdaGC",
                "AdaNorm",
                "AdamP",
                "AdamS",
                "Alice",
                "AvaGrad",
                "DAdaptAdaGrad",
                "DAdaptAdam",
                "DAdaptAdan",
                "DAdaptLion",
                "DAdaptSGD",
                "Fromage",
                "Lamb",
                "MARS",
                "Nero",
                "Prodigy",
                "RACS",
                "SGDP",
                "SGDSaI",
                "SWATS",
                "SpectralSphere",
            ),
            READS,
        ),
        "Magma": INNER,
    },
}
"""Optimizers that are refused, and why in short."""

REJECTED: dict[str, dict[str, str]] = {
    "lion_pytorch": {},
    "adan_pytorch": {},
    "schedulefree": {},
    "torch_optimizer": {"Adahessian": SECOND_BACKWARD},
    "pytorch_optimizer": {
        **dict.fromkeys(("AdaHessian", "SophiaH"), SECOND_BACKWARD),
        "Magma": INNER,
    },
}
"""Of those, the ones that cannot run as written on fp32 values either (tests/eager/test_packages.py)."""
