"""The last robust training losses of ATTA and ATAS beside the ratio of their bounds."""

from __future__ import annotations

from atas.paper import figure_study, published
from atas.paper.figure_study import Line, MeasuredStudy, Table, entries, mean, seed_list
from atas.paper.grid import QUICK_EPS, cifar, digits
from atas.paper.measurements import Curves, Norms, RobustLoss
from atas.paper.study import StudyOptions, select_budgets
from atas.paper.theory.bounds import both_ratios
from atas.sweeps.store import Store
from atas.sweeps.trial import format_eps

_QUICK_IMAGES = 300
_BETA = 0.5  # of ATAS


class ConvergenceGap(MeasuredStudy):
    """The runs of ATTA and ATAS in the table, attacked by PGD-10 on the whole training set."""

    accepted_options = ("eps", "seeds", "examples", "values", "reuse")
    required_measurements = (RobustLoss.name, Curves.name)

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return ATTA and ATAS for each budget."""
        grid = digits() if options.quick else cifar("cifar10", tuple(published.budgets("cifar10")))
        loss = RobustLoss(_QUICK_IMAGES if options.quick else None)
        lines = []
        for eps in select_budgets(options.eps, (QUICK_EPS,) if options.quick else grid.budgets):
            for method, more in (("atta", (loss, Curves())), ("atas", (loss, Curves(), Norms()))):
                trial = self.trial(options, grid, (grid.networks[0], method, eps), more)
                lines.append(Line(format_eps(eps), method, trial))
        return lines

    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return gap and ratio of the losses: under PGD-10, by the methods' own training losses, and the paper's."""
        results, lines, rows = self.line_records(options, store), [], []
        robust = [[float(entry["loss"]) for entry in entries(*pair, RobustLoss)] for pair in results]
        own = [[figure_study.metric_curve(record, "loss")[-1] for record in records] for _, records in results]
        for number, (line, _) in enumerate(results[::2]):
            atas = results[2 * number + 1][1]
            paper = published.convergence_gap(line.trial.resolved_recipe.method.eps) if not options.quick else None
            tails = [record.observed[Norms.name]["tail"]["mean"] for record in atas if Norms.name in record.observed]
            bounds = both_ratios(mean(tails), _BETA) if tails else None
            tail = [f"{mean(tails):.2f}", *(f"{value:.2f}" for value in bounds)] if bounds else ["-"] * 3
            for name, losses in (("PGD-10, final weights", robust), ("own, last epoch", own)):
                both = [mean(values) if values else None for values in losses[2 * number : 2 * number + 2]]
                cells = [f"{loss:.3f}" if loss is not None else "-" for loss in both]
                gap = _gap(*both)
                lines.append([line.panel, f"ours: {name}", *tail, *cells, *gap, seed_list(atas)])
                rows.append({"eps": line.panel, "loss": name, "atta": both[0], "atas": both[1], "tail": tails})
                tail = [""] * 3
            if paper:
                gap = [f"{paper['gap']:+.2f}", f"{paper['loss_ratio']:.2f}"]
                lines.append([line.panel, "paper", f"{paper['ratio']:.1f}", *[""] * 4, *gap, ""])
        header = ["eps", "loss", "tail", "ratio printed", "ratio right", "ATTA", "ATAS", "gap", "ATTA/ATAS", "seeds"]
        count = sorted({entry["n"] for pair in results for entry in entries(*pair, RobustLoss)})
        note = (
            f"PGD-10 on {', '.join(f'{n:,}' for n in count) or 'no'} training images, not augmented. The paper takes "
            "its ratio from its figure of gradient norms, whose caption has neither root nor beta: so it is most "
            "likely the tail, mean G^2 / (mean G)^2. Read so, the bounds differ by the right ratio, "
            "(1 - beta)^(1/4) tail^(1/2)."
        )
        return Table(header, lines, rows, notes=(note,))


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
