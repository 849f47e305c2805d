"""The last robust training losses of ATTA and ATAS beside the ratio of their bounds."""

from __future__ import annotations

from atas.reproduce import curves, paper
from atas.reproduce.figure_study import Line, ObservedStudy, Table, mean, seeds
from atas.reproduce.grid import QUICK_EPS, cifar, digits
from atas.reproduce.observations import Curves, Norms, RobustLoss
from atas.reproduce.record import Record
from atas.reproduce.store import Store
from atas.reproduce.studies.figure_gradient_norms import ratios
from atas.reproduce.study import Request, chosen_budgets
from atas.reproduce.trial import level

_QUICK_IMAGES = 300


class ConvergenceGap(ObservedStudy):
    """The table's runs of ATTA and ATAS; their weights meet PGD-10 on the whole training set."""

    options = ("eps", "seeds", "examples", "values", "reuse")
    needs = (RobustLoss.name, Curves.name)

    def lines(self, request: Request) -> list[Line]:
        """Two for each budget."""
        grid = digits() if request.quick else cifar("cifar10", tuple(paper.budgets("cifar10")))
        loss = RobustLoss(_QUICK_IMAGES if request.quick else None)
        found = []
        for eps in chosen_budgets(request.eps, (QUICK_EPS,) if request.quick else grid.budgets):
            for method, more in (("atta", (loss, Curves())), ("atas", (loss, Curves(), Norms()))):
                trial = self.trial(request, grid, (grid.networks[0], method, eps), more)
                found.append(Line(level(eps), method, trial))
        return found

    def table(self, request: Request, store: Store) -> Table:
        """The gap and the ratio of the losses; ours, the paper's, and with the methods' own training losses."""
        found, lines, rows = self.found(request, store), [], []
        for (line, atta), (_, atas) in zip(found[::2], found[1::2], strict=True):
            theirs = paper.convergence_gap(line.trial.settings.method.eps) if not request.quick else None
            tails = [record.observed[Norms.name]["tail"]["mean"] for record in atas if Norms.name in record.observed]
            bounds = ratios(mean(tails)) if tails else None
            tail = [f"{mean(tails):.2f}", *(f"{value:.2f}" for value in bounds)] if bounds else ["-"] * 3
            for name, of in (("PGD-10, final weights", _robust), ("own, last epoch", _own)):
                both = [mean(list(map(of, records))) if records else None for records in (atta, atas)]
                cells = [f"{loss:.3f}" if loss is not None else "-" for loss in both]
                gap = _gap(*both)
                lines.append([line.panel, f"ours: {name}", *tail, *cells, *gap, seeds(atas)])
                rows.append({"eps": line.panel, "loss": name, "atta": both[0], "atas": both[1], "tail": tails})
                tail = [""] * 3
            if theirs:
                gap = [f"{theirs['gap']:+.2f}", f"{theirs['loss_ratio']:.2f}"]
                lines.append([line.panel, "paper", f"{theirs['ratio']:.1f}", *[""] * 4, *gap, ""])
        header = ["eps", "loss", "tail", "ratio printed", "ratio right", "ATTA", "ATAS", "gap", "ATTA/ATAS", "seeds"]
        count = sorted({record.observed[RobustLoss.name]["n"] for _, records in found for record in records})
        note = (
            f"PGD-10 on {', '.join(f'{n:,}' for n in count) or 'no'} training images, not augmented. The paper takes "
            "its ratio from its figure of gradient norms, whose caption has neither root nor beta: so it is most "
            "likely the tail, mean G^2 / (mean G)^2. Read so, the bounds differ by the right ratio, "
            "(1 - beta)^(1/4) tail^(1/2)."
        )
        return Table(header, lines, rows, notes=(note,))


def _robust(record: Record) -> float:
    return float(record.observed[RobustLoss.name]["loss"])


def _own(record: Record) -> float:
    return curves.curve(record, "loss")[-1]


def _gap(atta: float | None, atas: float | None) -> list[str]:
    return ["-", "-"] if atta is None or atas is None else [f"{atta - atas:+.3f}", f"{atta / atas:.3f}"]


STUDY = ConvergenceGap(
    "table-convergence-gap",
    "gap of the last robust training losses of ATTA and ATAS beside the ratio of their bounds, eps 8, 12, 16/255",
    "Convergence gap of ATTA and ATAS",
    "the longer the tail of the gradient norms, the larger the gap between the last training losses of ATTA and ATAS: "
    "0.05, 0.10 and 0.12 at 8, 12 and 16/255. It does not say whether the loss is under PGD-10 or each method's own.",
    "both: the loss of the final weights under PGD-10, and the loss that each method had itself in its last epoch.",
)
