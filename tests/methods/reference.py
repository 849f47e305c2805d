"""Every training method once more, slowly: float64, formulas written out, loops over examples and pixels.

Nothing here uses the library. Random numbers are arguments. A reference function takes the state of the method and a
`Network`, does what one training step does, weights and BatchNorm statistics included, and returns an `Outcome`.
"""

import warnings
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


class Network:
    """The small network of the tests as formulas, with its own copies of the weights and statistics."""

    def __init__(self, model):
        self.activation = model.activation
        self.weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
        self.statistics = {name: value.detach().clone() for name, value in model.named_buffers()}

    def __call__(self, x, training, *, keep=None, stop=False, change=None, weights=None, record=True):
        """Logits. With `keep`, the output of that layer too, and alone with `stop`. `change(layer, output)` replaces
        the output of each convolution."""
        weights = self.weights if weights is None else weights
        kept = None
        for number, stride in ((1, 1), (2, 2)):
            conv, norm = f"conv{number}", f"bn{number}"
            x = F.conv2d(x, weights[f"{conv}.weight"], weights[f"{conv}.bias"], stride=stride, padding=1)
            if change is not None:
                x = change(conv, x)
            if keep == conv:
                kept = x
                if stop:
                    return kept
            if f"{norm}.weight" in weights:
                x = self._normalise(norm, x, training, weights, record)
            x = self.activation(x)
        features = x.sum((2, 3)) / (x.shape[2] * x.shape[3])
        logits = features @ weights["fc.weight"].T + weights["fc.bias"]
        return logits if keep is None else (logits, kept)

    def _normalise(self, name, x, training, weights, record):
        mean, variance = self.statistics[f"{name}.running_mean"], self.statistics[f"{name}.running_var"]
        if training:
            count = x.numel() / x.shape[1]
            batch_mean = x.sum((0, 2, 3)) / count
            batch_variance = ((x - batch_mean[:, None, None]) ** 2).sum((0, 2, 3)) / count
            if record:
                unbiased = batch_variance.detach() * count / (count - 1)
                self.statistics[f"{name}.running_mean"] = 0.9 * mean + 0.1 * batch_mean.detach()
                self.statistics[f"{name}.running_var"] = 0.9 * variance + 0.1 * unbiased
                self.statistics[f"{name}.num_batches_tracked"] = self.statistics[f"{name}.num_batches_tracked"] + 1
            mean, variance = batch_mean, batch_variance
        scaled = (x - mean[:, None, None]) / (variance[:, None, None] + 1e-5) ** 0.5
        return scaled * weights[f"{name}.weight"][:, None, None] + weights[f"{name}.bias"][:, None, None]

    def gradients(self, loss, *inputs):
        """The loss's gradients for all weights, by name, and for some inputs."""
        found = torch.autograd.grad(loss, [*self.weights.values(), *inputs], allow_unused=True, retain_graph=True)
        zeros = (torch.zeros_like(w) if g is None else g for w, g in zip(self.weights.values(), found, strict=False))
        return dict(zip(self.weights, zeros, strict=True)), found[len(self.weights) :]

    def descend(self, gradients, rate):
        """A step of plain gradient descent."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight -= rate * gradients[name]


@dataclass
class Outcome:
    """What a step did: the last inputs, loss and logits, and the gradients of every update of the weights."""

    inputs: torch.Tensor
    loss: torch.Tensor
    logits: torch.Tensor
    updates: list
    notes: dict = field(default_factory=dict)


class Ball:
    """The threat model, one example at a time."""

    def __init__(self, norm, eps):
        self.norm, self.eps = norm, eps

    def direction(self, gradient):
        """Where one unit of step leads."""
        result = torch.zeros_like(gradient)
        for i, g in enumerate(gradient):
            if self.norm == "linf":
                result[i] = (g > 0).to(g.dtype) - (g < 0).to(g.dtype)
            elif g.abs().max() > 0:
                result[i] = g / (g * g).sum().sqrt()
        return result

    def shrink(self, change):
        """Back into the ball around zero."""
        result = change.clone()
        for i, one in enumerate(change):
            if self.norm == "linf":
                result[i] = one.clip(-self.eps, self.eps)
            elif (one * one).sum().sqrt() > self.eps:
                result[i] = one * (self.eps / (one * one).sum().sqrt())
        return result

    def project(self, point, x):
        """Back into the ball, then back to [0, 1]."""
        result = torch.zeros_like(point)
        for i in range(len(x)):
            change = point[i] - x[i]
            if self.norm == "linf":
                change = change.clip(-self.eps, self.eps)
            else:
                length = (change * change).sum().sqrt()
                if length > self.eps:
                    change = change * (self.eps / length)
            result[i] = (x[i] + change).clip(0, 1)
        return result

    def move(self, point, gradient, sizes, x):
        """A step and the projection; one size an example, or one for all."""
        sizes = torch.as_tensor(sizes, dtype=point.dtype).expand(len(point))
        return self.project(point + sizes[:, None, None, None] * self.direction(gradient), x)


def losses(logits, y):
    """The cross-entropy of each example."""
    return torch.stack([row.logsumexp(0) - row[label] for row, label in zip(logits, y, strict=True)])


def log_probabilities(logits):
    return logits - logits.logsumexp(1, keepdim=True)


def input_gradients(net, x, y, training):
    """Each example's gradient of the summed loss: one example at a time where BatchNorm does not tie them together."""
    if training:
        x = x.clone().requires_grad_()
        logits = net(x, True)
        return torch.autograd.grad(losses(logits, y).sum(), x)[0], logits.detach()
    gradients, logits = [], []
    for i in range(len(x)):
        gradient, one = _eval_gradient(net, x[i : i + 1], lambda out, i=i: losses(out, y[i : i + 1]).sum())
        gradients.append(gradient)
        logits.append(one)
    return torch.cat(gradients), torch.cat(logits)


def _eval_gradient(net, x, loss):
    x = x.clone().requires_grad_()
    logits = net(x, False)
    return torch.autograd.grad(loss(logits), x)[0], logits.detach()


def train_on(net, inputs, y, rate, criterion=None, **notes):
    """One update with the mean loss at the inputs, in train mode; `criterion(logits)` replaces the cross-entropy."""
    logits = net(inputs, True)
    loss = losses(logits, y).sum() / len(y) if criterion is None else criterion(logits)
    gradients, _ = net.gradients(loss)
    net.descend(gradients, rate)
    return Outcome(inputs, loss.detach(), logits.detach(), [gradients], notes)


def standard(net, x, y, rate):
    return train_on(net, x, y, rate)


def fgsm(net, ball, x, y, rate, step):
    gradient, _ = input_gradients(net, x, y, training=True)
    return train_on(net, ball.move(x, gradient, step, x), y, rate)


def fgsm_rs(net, ball, noise, x, y, rate, step):
    start = ball.project(x + noise, x)
    gradient, _ = input_gradients(net, start, y, training=True)
    return train_on(net, ball.move(start, gradient, step, x), y, rate)


def pgd(net, ball, noise, x, y, rate, step, steps, training=True):
    point = ball.project(x + noise, x)
    for _ in range(steps):
        gradient, _ = input_gradients(net, point, y, training)
        point = ball.move(point, gradient, step, x)
    return train_on(net, point, y, rate)


def adaptive_sizes(gradient, average, c, max_step, beta):
    """The paper's step sizes, gamma / (c + sqrt v) with gamma = c max_step, and the new averages v."""
    averages = average.clone()
    sizes = torch.zeros_like(average)
    for i, g in enumerate(gradient):
        averages[i] = beta * average[i] + (1 - beta) * (g * g).sum()
        sizes[i] = c * max_step / (c + averages[i].sqrt())
    return sizes, averages


def fgsm_rs_adaptive(net, ball, norms, noise, x, y, index, rate, *, c, max_step, beta, scale):
    """`norms` has the averages of all examples, and changes."""
    start = ball.project(x + noise, x)
    gradient, _ = input_gradients(net, start, y, training=True)
    sizes, averages = adaptive_sizes(gradient, norms[index], c, max_step, beta)
    norms[index] = averages
    return train_on(net, ball.move(start, gradient, scale * sizes, x), y, rate, sizes=scale * sizes)


def ssat(net, ball, noise, x, y, rate, step, checkpoints):
    start = ball.project(x + noise, x)
    gradient, logits = input_gradients(net, start, y, training=False)
    end = ball.move(start, gradient, step, x)
    inputs, branches = x.clone(), []
    for i in range(len(x)):
        branch = 0
        if logits[i].argmax() == y[i]:
            branch = checkpoints
            for k in range(1, checkpoints):
                part = x[i] + k / checkpoints * (end[i] - x[i])
                if net(part[None], False)[0].argmax() != y[i]:
                    branch = k
                    break
        inputs[i] = x[i] + branch / checkpoints * (end[i] - x[i])
        branches.append(branch)
    right_at_x = net(x, False).argmax(1) == y
    return train_on(net, inputs, y, rate, branches=branches, right_at_x=right_at_x.tolist())


def trades(net, ball, noise, x, y, rate, *, step, steps, beta):
    """`noise` is standard normal. The start is not projected."""
    point = x + 0.001 * noise
    for _ in range(steps):
        gradient = torch.zeros_like(x)
        for i in range(len(x)):
            clean = log_probabilities(net(x[i : i + 1], False)).detach()
            gradient[i], _ = (
                part[0]
                for part in _eval_gradient(
                    net, point[i : i + 1], lambda out, p=clean: (p.exp() * (p - log_probabilities(out))).sum()
                )
            )
        point = ball.move(point, gradient, step, x)
    clean, logits = net(x, True), net(point, True)
    p, q = log_probabilities(clean), log_probabilities(logits)
    divergences = torch.stack([(p[i].exp() * (p[i] - q[i])).sum() for i in range(len(x))])
    loss = (losses(clean, y).sum() + beta * divergences.sum()) / len(x)
    gradients, _ = net.gradients(loss)
    net.descend(gradients, rate)
    return Outcome(point, loss.detach(), logits.detach(), [gradients])


def n_fgsm(net, ball, noise, x, y, rate, step):
    """`noise` is of the larger ball; only [0, 1] bounds the inputs."""
    start = (x + noise).clip(0, 1)
    gradient, _ = input_gradients(net, start, y, training=True)
    return train_on(net, (start + step * ball.direction(gradient)).clip(0, 1), y, rate)


def mart(net, ball, noise, x, y, rate, *, step, steps, beta):
    """`noise` is standard normal. The start is not projected."""
    point = x + 0.001 * noise
    for _ in range(steps):
        gradient, _ = input_gradients(net, point, y, training=False)
        point = ball.move(point, gradient, step, x)
    clean, logits = net(x, True), net(point, True)
    p, q, total = log_probabilities(clean).exp(), log_probabilities(logits).exp(), losses(logits, y).sum()
    for i, label in enumerate(y.tolist()):
        wrong = max(q[i, c] for c in range(q.shape[1]) if c != label)
        total = total - torch.log(1.0001 - wrong + 1e-12)
        divergence = sum(p[i, c] * (p[i, c].log() - torch.log(q[i, c] + 1e-12)) for c in range(q.shape[1]))
        total = total + beta * (1.0000001 - p[i, label]) * divergence
    loss = total / len(x)
    gradients, _ = net.gradients(loss)
    net.descend(gradients, rate)
    return Outcome(point, loss.detach(), logits.detach(), [gradients])


def squared_distance(logits, clean):
    """Of the predictions, summed over the batch: GAT."""
    return ((log_probabilities(logits).exp() - log_probabilities(clean).exp()) ** 2).sum()


def nuclear_distance(logits, clean):
    """The sum of the singular values of the difference: NuAT."""
    return torch.linalg.svdvals(logits - clean).sum()


def guided(net, ball, signs, x, y, rate, *, step, weight, guide, distance):
    """GAT and NuAT; `signs` are random numbers whose direction is that of the start."""
    clean = net(x, True).detach()
    point = ball.move(x, signs, ball.eps / 2, x).requires_grad_()
    logits = net(point, False)
    (gradient,) = torch.autograd.grad(losses(logits, y).sum() + guide * distance(logits, clean), point)
    inputs = ball.move(point.detach(), gradient, step, x)
    logits, clean = net(inputs, True), net(x, True)
    loss = (losses(clean, y).sum() + weight * distance(logits, clean)) / len(x)
    gradients, _ = net.gradients(loss)
    net.descend(gradients, rate)
    return Outcome(inputs, loss.detach(), logits.detach(), [gradients])


def slat(net, ball, layers, x, y, rate, *, step, layer_step):
    """One pixel of a hidden layer after the other."""
    kept = {}

    def keep(layer, output):
        kept[layer] = output
        return output

    start = x.clone().requires_grad_()
    total = losses(net(start, True, change=keep), y).sum()
    gradient, *hidden = torch.autograd.grad(total, [start, *(kept[layer] for layer in layers)])
    moves = dict(zip(layers, (ball.direction(g) * layer_step for g in hidden), strict=True))
    notes = {"cut": 0, "moved": 0}

    def perturb(layer, output):
        if layer not in moves:
            return output
        noise = ball.shrink(moves[layer])
        for i, image in enumerate(output.detach()):
            for c, channel in enumerate(image):
                low, high = float(channel.min()), float(channel.max())
                for place in [(r, k) for r in range(channel.shape[0]) for k in range(channel.shape[1])]:
                    wanted = float(noise[i, c][place])
                    noise[i, c][place] = max(min(wanted, high - float(channel[place])), low - float(channel[place]))
                    notes["cut"] += float(noise[i, c][place]) != wanted
                    notes["moved"] += 1
        return output + noise

    inputs = ball.move(x, gradient, step, x)
    logits = net(inputs, True, change=perturb)
    loss = losses(logits, y).sum() / len(y)
    gradients, _ = net.gradients(loss)
    net.descend(gradients, rate)
    return Outcome(inputs, loss.detach(), logits.detach(), [gradients], notes)


def soft_losses(logits, targets):
    return -(targets * log_probabilities(logits)).sum(1)


def randomly_smoothed(y, smoothing, weights):
    """Labels whose part `smoothing` goes to the other classes in proportion to these weights."""
    targets = torch.zeros_like(weights)
    for i, label in enumerate(y.tolist()):
        others = [c for c in range(weights.shape[1]) if c != label]
        for c in others:
            targets[i, c] = smoothing * weights[i, c] / sum(weights[i, o] for o in others)
        targets[i, label] = 1 - smoothing
    return targets


def liet_patterns(net, ball, weights, shape, smoothing):
    """A perturbation for each class, from an image of 0.5."""
    classes = len(weights)
    grey, labels = torch.full((classes, *shape), 0.5, dtype=torch.float64), torch.arange(classes)
    targets = randomly_smoothed(labels, smoothing, weights)
    grey.requires_grad_()
    (gradient,) = torch.autograd.grad(soft_losses(net(grey, False), targets).sum(), grey)
    return ball.eps * ball.direction(gradient)


def liet(net, ball, patterns, chance, x, y, rate, *, step, smoothing, weight, reach=None):
    """`chance` has the noise, where it replaces the patterns, the sign, and the weights of both label smoothings. The
    pass at the start is made once; its graph serves the attack and the loss."""
    start = x.clone()
    for i, label in enumerate(y.tolist()):
        start[i] += chance["sign"] * torch.where(chance["replaced"][i], chance["noise"][i], patterns[label])
    noisy = ball if reach is None else Ball(ball.norm, 2 * ball.eps)
    start = noisy.project(start, x).requires_grad_()
    first = net(start, True)
    attacked = soft_losses(first, randomly_smoothed(y, smoothing, chance["attack"])).sum()
    (gradient,) = torch.autograd.grad(attacked, start, retain_graph=True)
    inputs = (reach or ball).move(start.detach(), gradient, step, x)
    logits = net(inputs, True)
    p, q = log_probabilities(first).exp(), log_probabilities(logits).exp()
    middle = ((p + q) / 2).log()
    divergence = (p * (p.log() - middle)).sum() / 2 + (q * (q.log() - middle)).sum() / 2
    targets = randomly_smoothed(y, smoothing, chance["train"])
    loss = (soft_losses(logits, targets).sum() + weight * divergence) / len(x)
    gradients, _ = net.gradients(loss)
    net.descend(gradients, rate)
    return Outcome(inputs, loss.detach(), logits.detach(), [gradients])


def tdat(net, ball, carried, x, y, rate, *, step, kept, weight):
    """`carried` has one perturbation for each place in a batch, and changes; `kept` is the share of the labels."""
    start, classes = (x + carried[: len(x)]).requires_grad_(), net.weights["fc.bias"].numel()
    attacked, trained = torch.zeros(2, len(x), classes, dtype=x.dtype)
    for i, label in enumerate(y.tolist()):
        attacked[i], attacked[i, label] = (1 - kept) / (classes - 1), kept
        trained[i] = (1 - kept) / classes
        trained[i, label] += kept
    first = net(start, True)
    (gradient,) = torch.autograd.grad(soft_losses(first, attacked).sum(), start, retain_graph=True)
    inputs = ball.move(start.detach(), gradient, step, x)
    carried[: len(x)] = inputs - x
    logits, total = net(inputs, True), 0.0
    for i, label in enumerate(y.tolist()):
        doubt = torch.tanh(1.0000001 - log_probabilities(first)[i, label].exp())
        total = total + soft_losses(logits, trained)[i] + weight * doubt * ((first[i] - logits[i]) ** 2).sum()
    loss = total / len(x)
    gradients, _ = net.gradients(loss)
    net.descend(gradients, rate)
    return Outcome(inputs, loss.detach(), logits.detach(), [gradients])


def free(net, ball, carried, x, y, rate, *, step, replays):
    """`carried` has one perturbation for each place in a batch, and changes."""
    change, updates = carried[: len(x)].clone(), []
    for _ in range(replays):
        inputs = ball.project(x + change, x).requires_grad_()
        logits = net(inputs, True)
        loss = losses(logits, y).sum() / len(y)
        gradients, (gradient,) = net.gradients(loss, inputs)
        updates.append(gradients)
        net.descend(gradients, rate)
        change = ball.move(x + change, gradient, step, x) - x
    carried[: len(x)] = change
    return Outcome(inputs.detach(), loss.detach(), logits.detach(), updates)


def free_as_released(net, eps, carried, x, y, rate, *, step, replays, clamp):
    """As the programs do: autograd goes through what they clamp, and the carried perturbation is a leaf."""
    updates = []
    for _ in range(replays):
        delta = carried[: len(x)].clone().requires_grad_()
        inputs = x + delta
        if clamp == "inputs":  # in1 = input + noise; in1.clamp_(0, 1)
            inputs = inputs.clamp(0, 1)
        logits = net(inputs, True)
        loss = losses(logits, y).sum() / len(y)
        gradients, (gradient,) = net.gradients(loss, delta)
        updates.append(gradients)
        net.descend(gradients, rate)
        carried[: len(x)] = (delta.detach() + step * gradient.sign()).clip(-eps, eps)
        if clamp == "carried":  # delta = clamp(delta, lower_limit - X, upper_limit - X)
            carried[: len(x)] = torch.minimum(torch.maximum(carried[: len(x)], -x), 1 - x)
    return Outcome(inputs.detach(), loss.detach(), logits.detach(), updates)


def yopo(net, ball, noise, x, y, rate, *, step, outer, inner, layer, first_layer_twice=False):
    point = ball.project(x + noise, x)
    total = {name: torch.zeros_like(weight) for name, weight in net.weights.items()}

    def collect(gradients):
        for name in total:
            total[name] = total[name] + gradients[name]

    for turn in range(outer):
        inputs = point
        logits, hidden = net(inputs, True, keep=layer)
        loss = losses(logits, y).sum() / len(y)
        gradients, (at_layer,) = net.gradients(loss, hidden)
        collect(gradients)
        if turn == outer - 1 and not first_layer_twice:
            break
        p = -at_layer
        for _ in range(inner):
            point = point.detach().requires_grad_()
            hamiltonian = (net(point, True, keep=layer, stop=True) * p).sum()
            (gradient,) = torch.autograd.grad(hamiltonian, point)
            point = ball.move(point.detach(), -gradient, step, x)
        if first_layer_twice:
            hamiltonian = (net(point, True, keep=layer, stop=True) * p).sum()
            collect(net.gradients(-hamiltonian)[0])
    net.descend(total, rate)
    return Outcome(inputs, loss.detach(), logits.detach(), [total])


def fgsm_ga(net, ball, noise, x, y, rate, *, step, weight):
    """The regulariser's weight gradient needs no second backward pass here.

    With u_i the derivative of 1 - cos(g_i, g'_i) by g'_i, held fixed, it is the derivative of sum_i u_i . g'_i by the
    weights, which is how the weight gradient of the loss changes as the inputs move along u: forward differentiation.
    """
    first, _ = input_gradients(net, x, y, training=True)
    nearby = x + noise
    second, _ = input_gradients(net, nearby, y, training=True)
    counted = [i for i in range(len(x)) if first[i].abs().max() > 0 and second[i].abs().max() > 0]
    along, misalignments = torch.zeros_like(x), []
    for i in counted:
        a, b = first[i] / (first[i] ** 2).sum().sqrt(), second[i]
        length = (b * b).sum().sqrt()
        cosine = (a * b).sum() / length
        misalignments.append(1 - cosine)
        along[i] = -(a - cosine * b / length) / length / len(counted)

    def weight_gradient(inputs):
        def loss(weights):
            return losses(net(inputs, True, weights=weights, record=False), y).sum()

        return torch.func.grad(loss)({name: value.detach() for name, value in net.weights.items()})

    with warnings.catch_warnings():  # forward differentiation loads a module that torch itself calls deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        _, regulariser = torch.func.jvp(weight_gradient, (nearby,), (along,))
    inputs = ball.move(x, first, step, x)
    logits = net(inputs, True)
    loss = losses(logits, y).sum() / len(y)
    gradients, _ = net.gradients(loss)
    total = {name: gradients[name] + weight * regulariser[name] for name in gradients}
    net.descend(total, rate)
    loss = loss.detach() + weight * (sum(misalignments) / len(misalignments) if misalignments else 0.0)
    return Outcome(inputs, loss, logits.detach(), [total], {"counted": counted})


class Targets:
    """Smoothed labels mixed with averages of predictions, one example at a time; `averages` holds those seen so far."""

    def __init__(self, classes, *, smoothing=0.0, share=0.0, decay=0.0, from_epoch=0):
        self.classes, self.smoothing, self.share = classes, smoothing, share
        self.decay, self.from_epoch = decay, from_epoch
        self.averages = {}

    def of(self, i, label, epoch, spread=None):
        """The target of example i; `spread` is where smoothing moves probability to, by default everywhere equally."""
        hard = torch.zeros(self.classes, dtype=torch.float64)
        hard[label] = 1.0
        spread = torch.full_like(hard, 1 / self.classes) if spread is None else spread
        soft = (1 - self.smoothing) * hard + self.smoothing * spread
        share = self.share if epoch >= self.from_epoch else 0.0
        return (1 - share) * soft + share * self.averages.get(i, hard)

    def loss(self, logits, y, index, epoch):
        """The mean cross-entropy with the targets; then the averages take these predictions in."""
        total = 0.0
        for row, label, i in zip(logits, y.tolist(), index.tolist(), strict=True):
            target, log_p = self.of(i, label, epoch), row - row.logsumexp(0)
            total = total - sum(target[c] * log_p[c] for c in range(self.classes))
            hard = torch.zeros(self.classes, dtype=torch.float64)
            hard[label] = 1.0
            before = self.averages.get(i, hard)
            self.averages[i] = self.decay * before + (1 - self.decay) * log_p.detach().exp()
        return total / len(y)


# Memory: canvases with `pad` pixels around each image, looked at through (top, left, flip).


def pad_image(image, pad):
    channels, height, width = image.shape
    canvas = torch.zeros(channels, height + 2 * pad, width + 2 * pad, dtype=image.dtype)
    canvas[:, pad : pad + height, pad : pad + width] = image
    return canvas


def _places(view, height, width):
    """The row and the column of the canvas that each place of the window shows."""
    top, left, flip = view
    rows = [[top + row for column in range(width)] for row in range(height)]
    columns = [[left + (width - 1 - column if flip else column) for column in range(width)] for row in range(height)]
    return rows, columns


def look(canvas, view, height, width):
    """The window of one canvas."""
    rows, columns = _places(view, height, width)
    return canvas[:, rows, columns]


def paste(canvas, view, window):
    """Put a window back onto its canvas."""
    rows, columns = _places(view, *window.shape[1:])
    canvas[:, rows, columns] = window


class Remembering:
    """What ATTA and ATAS have in common; `canvases` is the noise that the memory begins with."""

    training, write_back = False, True

    def __init__(self, ball, canvases, pad, reset_every, epochs):
        self.ball, self.canvases, self.pad = ball, canvases.clone(), pad
        self.reset_every, self.epochs = reset_every, epochs
        self.resets, self.targets = [], None

    def begin(self, epoch, fresh):
        """Epochs count from 0 here and from 1 in the authors' code; `fresh(epoch)` gives new noise."""
        if (epoch + 1) % self.reset_every == 0 and epoch + 1 != self.epochs:
            self.canvases = fresh(epoch).clone()
            self.resets.append(epoch)

    def step(self, net, images, y, index, views, rate, epoch):
        height, width = images.shape[2:]
        pairs = list(zip(index.tolist(), views, strict=True))
        x = torch.stack([look(pad_image(images[i], self.pad), view, height, width) for i, view in pairs])
        remembered = torch.stack([look(self.canvases[i], view, height, width) for i, view in pairs])
        start = self.ball.project(x + remembered, x)
        gradient, _ = input_gradients(net, start, y, self.training)
        sizes, notes = self.sizes(gradient, index, epoch)
        inputs = self.ball.move(start, gradient, sizes, x)
        for place, (i, view) in enumerate(pairs if self.write_back else ()):
            paste(self.canvases[i], view, inputs[place] - x[place])
        criterion = None if self.targets is None else lambda logits: self.targets.loss(logits, y, index, epoch)
        return train_on(net, inputs, y, rate, criterion, x=x, sizes=sizes, **notes)


class Atta(Remembering):
    def __init__(self, *args, step):
        super().__init__(*args)
        self.constant = step

    def sizes(self, gradient, index, epoch):
        return torch.full((len(gradient),), self.constant, dtype=gradient.dtype), {}


class Atas(Remembering):
    def __init__(self, *args, c, max_step, beta, clip, warmup_epochs, scale):
        super().__init__(*args)
        self.c, self.max_step, self.beta, self.clip, self.warmup_epochs = c, max_step, beta, clip, warmup_epochs
        self.scale = scale
        self.norms = torch.zeros(len(self.canvases), dtype=torch.float64)

    def sizes(self, gradient, index, epoch):
        if epoch < self.warmup_epochs:
            return torch.full((len(gradient),), self.scale * self.ball.eps, dtype=gradient.dtype), {}
        raw, self.norms[index] = adaptive_sizes(gradient, self.norms[index], self.c, self.max_step, self.beta)
        sizes = raw.clone()
        if self.clip is not None:
            for i, size in enumerate(raw):
                sizes[i] = min(max(float(size), self.clip[0]), self.clip[1])
        return self.scale * sizes, {"raw": raw}


# Later single-step methods.


def smoothed_loss(logits, y, true):
    """The mean cross-entropy with the probability `true` for the label and the same one for each other class."""
    total, classes = 0.0, logits.shape[1]
    for row, label in zip(log_probabilities(logits), y.tolist(), strict=True):
        for c in range(classes):
            total = total - (true if c == label else (1 - true) / (classes - 1)) * row[c]
    return total / len(y)


class Uap:
    """FGSM-UAP as released, which keeps the graph of the first pass and collects gradients of both losses at the start.
    `universal` has a perturbation for each group."""

    def __init__(self, ball, universal, *, radius, step, kept, weight, decay):
        self.ball, self.radius, self.universal = ball, radius, universal.clone()
        self.momenta = torch.zeros_like(universal)
        self.size, self.kept, self.weight, self.decay = step, kept, weight, decay

    def step(self, net, x, y, groups, rate, reach):
        """`groups` has the number of each image's perturbation; `reach` is the step of a perturbation."""
        start = torch.stack([image + self.universal[k] for image, k in zip(x, groups, strict=True)])
        start = self.ball.project(start, x).requires_grad_()
        before = net(start, True)
        loss = smoothed_loss(before, y, self.kept)
        (attack,) = torch.autograd.grad(loss, start, retain_graph=True)
        inputs = self.ball.move(start.detach(), attack, self.size, x)
        logits = net(inputs, True)
        loss = smoothed_loss(logits, y, self.kept) + self.weight * ((logits - before) ** 2).sum() / logits.numel()
        gradients, (of_loss,) = net.gradients(loss, start)
        net.descend(gradients, rate)
        gradient = attack + of_loss
        for k in set(groups):
            own = torch.stack([g for g, group in zip(gradient, groups, strict=True) if group == k])
            self.momenta[k] = own.sum(0) / len(own) / gradient.abs().sum() + self.decay * self.momenta[k]
            moved = self.universal[k] + reach * self.ball.direction(self.momenta[k : k + 1])[0]
            if self.ball.norm == "linf":
                self.universal[k] = moved.clip(-self.radius, self.radius)
            else:
                self.universal[k] = moved * min(1.0, self.radius / float((moved * moved).sum().sqrt()))
        return Outcome(inputs, loss.detach(), logits.detach(), [gradients], {"groups": set(groups)})


class Pgi:
    """FGSM-MEP as released, which keeps the graph of the first pass. `stored` has the corners that it begins with."""

    def __init__(self, ball, stored, pad, *, step, true, weight, decay):
        self.ball, self.stored, self.momenta, self.pad = ball, stored.clone(), torch.zeros_like(stored), pad
        self.size, self.true, self.weight, self.decay = step, true, weight, decay

    def trust(self, before, logits, y):
        """The weight of the new gradients."""
        return 1.0

    def further(self, net, x, y):
        """What else the loss has."""
        return 0.0

    def step(self, net, x, y, index, views, rate):
        """`views` are where images and their rows are looked at together; None: rows lie over what is shown."""
        height, width = x.shape[2:]
        pairs = list(zip(index.tolist(), views or [(0, 0, False)] * len(x), strict=True))
        d, m = (
            torch.stack([look(rows[i], v, height, width) for i, v in pairs]) for rows in (self.stored, self.momenta)
        )
        start = (x + d).requires_grad_()
        before = net(start, True)
        (gradient,) = torch.autograd.grad(smoothed_loss(before, y, self.true), start, retain_graph=True)
        start = start.detach()
        inputs = self.ball.move(start, gradient, self.size, x)
        logits = net(inputs, True)
        m = self.trust(before, logits, y) * gradient / gradient.abs().sum() + self.decay * m
        following = self.ball.move(start, m, self.size, x) - x
        for place, (i, view) in enumerate(pairs):
            paste(self.momenta[i], view, m[place])
            paste(self.stored[i], view, following[place])
        difference = ((logits - before) ** 2).sum() / logits.numel()
        loss = smoothed_loss(logits, y, self.true) + self.weight * difference + self.further(net, x, y)
        gradients, _ = net.gradients(loss)
        net.descend(gradients, rate)
        return Outcome(inputs, loss.detach(), logits.detach(), [gradients])


class Constraint:
    """Of ConvergeSmooth: how the loss on unattacked images may change. `signs` are those of its terms so far."""

    def __init__(self, gamma, ratio, true, active):
        self.gamma, self.ratio, self.true, self.active = gamma, ratio, true, active
        self.mean = self.change = 0.0
        self.seen, self.epoch, self.signs = [], 0, []

    def begin(self, epoch):
        """Take over the mean of the last epoch."""
        if epoch != self.epoch:
            mean = sum(count * loss for count, loss in self.seen) / sum(count for count, _ in self.seen)
            self.change, self.mean, self.seen, self.epoch = mean - self.mean, mean, [], epoch

    def term(self, net, x, y):
        """The loss on these images, plus or minus, or nothing."""
        loss = smoothed_loss(net(x, True), y, self.true)
        value = float(loss.detach())
        self.seen.append((len(x), value))
        above = value - self.mean
        limit = min(max(self.gamma / self.ratio, self.change), self.gamma)
        sign = 0 if self.epoch not in self.active or abs(above) <= limit else 1 if above > 0 else -1
        self.signs.append(sign)
        return sign * loss


def fgsm_rs_cs(net, ball, noise, x, y, rate, *, step, constraint):
    """ConvergeSmooth as released, which takes the noisy images for the clean ones."""
    noisy = ball.project(x + noise, x)
    gradient, _ = input_gradients(net, noisy, y, training=True)
    inputs = (noisy + step * ball.direction(gradient)).clip(0, 1)
    return train_on(
        net, inputs, y, rate, lambda z: smoothed_loss(z, y, constraint.true) + constraint.term(net, noisy, y)
    )


class MepCs(Pgi):
    """FGSM-MEP with ConvergeSmooth."""

    def further(self, net, x, y):
        return self.constraint.term(net, x, y)


class Pgk(Pgi):
    """FGSM-PGK; `ratio` is that of the accuracies of the last batch, at both ends of the attack."""

    ratio = 1.0

    def trust(self, before, logits, y):
        """Less for attacks that fool the model in few images."""
        right, at_start = (
            sum(int(z[i].argmax()) == label for i, label in enumerate(y.tolist())) for z in (logits, before)
        )
        self.ratio = right / at_start if at_start else 1.0
        return 2 - self.ratio

    def average_decay(self, usual, threshold):
        """The decay of averaged weights in this step."""
        return usual if self.ratio < threshold else min(1.0, 0.99999 * self.ratio / threshold)


class Pco:
    """FGSM-PCO as released, which keeps the graph of the first pass. `stored` has the corners that it begins with."""

    def __init__(self, ball, stored, pad, *, step, true, weight, stretch):
        self.ball, self.stored, self.pad = ball, stored.clone(), pad
        self.size, self.true, self.weight, self.stretch = step, true, weight, stretch

    def step(self, net, x, y, index, views, rate):
        """`views` are as in `Pgi.step`."""
        pairs = list(zip(index.tolist(), views or [(0, 0, False)] * len(x), strict=True))
        start = (x + torch.stack([look(self.stored[i], v, *x.shape[2:]) for i, v in pairs])).requires_grad_()
        before = net(start, True)
        (gradient,) = torch.autograd.grad(smoothed_loss(before, y, self.true), start, retain_graph=True)
        start = start.detach()
        end = self.ball.move(start, gradient, self.size, x)
        for place, (i, view) in enumerate(pairs):
            paste(self.stored[i], view, end[place] - x[place])
        mixed = []
        for i, label in enumerate(y.tolist()):
            k = 1 - log_probabilities(before)[i, label].exp()
            mixed.append(k * start[i] + (1 - k) * (x[i] + self.stretch * (end[i] - x[i])))
        mixed = torch.stack(mixed)
        logits, after = net(mixed, True), net(end, True)
        past, present = (((after - other) ** 2).sum() / logits.numel() for other in (before, logits))
        larger = past > present
        loss = smoothed_loss(logits, y, self.true) + self.weight * (past - present if larger else present - past)
        gradients, _ = net.gradients(loss)
        net.descend(gradients, rate)
        notes = {"larger": bool(larger), "outside": bool(((mixed < 0) | (mixed > 1)).any())}
        return Outcome(mixed.detach(), loss.detach(), logits.detach(), [gradients], notes)


def zerograd(net, ball, noise, x, y, rate, *, step, quantile):
    start = ball.project(x + noise, x)
    gradient, _ = input_gradients(net, start, y, training=True)
    zeros = 0
    for g in gradient:
        ordered = sorted(g.abs().flatten().tolist())
        place = quantile * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        limit = ordered[low] + (place - low) * (ordered[high] - ordered[low])
        small = g.abs() < limit
        g[small] = 0
        zeros += int(small.sum())
    return train_on(net, ball.move(start, gradient, step, x), y, rate, zeros=zeros)


def multigrad(net, ball, noises, x, y, rate, *, step):
    signs = []
    for noise in noises:
        gradient, _ = input_gradients(net, ball.project(x + noise, x), y, training=True)
        signs.append(gradient.sign())
    agreed = torch.where(sum(signs).abs() == len(signs), signs[0], torch.zeros_like(x))
    return train_on(net, ball.move(x, agreed, step, x), y, rate, agreed=int((agreed != 0).sum()))


class Elle:
    """ELLE-A, or with a constant weight ELLE; `weight` is what the penalty counts now."""

    def __init__(self, ball, *, step, weight, adaptive, decay=0.99, sensitivity=2.0):
        self.ball, self.size, self.high, self.adaptive = ball, step, weight, adaptive
        self.decay, self.sensitivity = decay, sensitivity
        self.weight, self.history = 0.0 if adaptive else weight, []

    def step(self, net, noises, part, x, y, rate):
        gradient, _ = input_gradients(net, x, y, training=True)
        inputs = x + self.size * self.ball.direction(gradient)
        logits = net(inputs, True)
        a, b = (x + noise for noise in noises)
        c = torch.stack([(1 - u) * one + u * other for u, one, other in zip(part, a, b, strict=True)])
        at_a, at_b, at_c = losses(net(torch.cat([a, b, c]), True), torch.cat([y, y, y])).split(len(y))
        error = sum((at_c[i] - (1 - part[i]) * at_a[i] - part[i] * at_b[i]) ** 2 for i in range(len(y))) / len(y)
        loss = losses(logits, y).sum() / len(y) + self.weight * error
        gradients, _ = net.gradients(loss)
        net.descend(gradients, rate)
        if self.adaptive:
            self._adapt(float(error.detach()))
        return Outcome(inputs, loss.detach(), logits.detach(), [gradients])

    def _adapt(self, error):
        jump = False
        if len(self.history) > 2:
            mean = sum(self.history) / len(self.history)
            deviation = (sum((value - mean) ** 2 for value in self.history) / len(self.history)) ** 0.5
            jump = error > mean + self.sensitivity * deviation
        self.weight = self.high if jump else self.decay * self.weight
        self.history.append(error)


def aaer(net, ball, noise, x, y, rate, *, step, free, loss_weight, logit_weight):
    start = (x + 2 * noise).clip(0, 1) if free else ball.project(x + noise, x)
    gradient, before = input_gradients(net, start, y, training=True)
    inputs = (start + step * ball.direction(gradient)).clip(0, 1) if free else ball.move(start, gradient, step, x)
    logits = net(inputs, True)
    loss, notes = aaer_loss(before, logits, y, loss_weight, logit_weight)
    gradients, _ = net.gradients(loss)
    net.descend(gradients, rate)
    return Outcome(inputs, loss.detach(), logits.detach(), [gradients], notes)


def aaer_loss(before, logits, y, loss_weight, logit_weight):
    """The loss, and what was found of the examples; `before` are the logits at the start."""
    old, new = losses(before, y), losses(logits, y)
    variations = ((logits - before) ** 2).sum(1)
    abnormal = [i for i in range(len(y)) if old[i] > new[i]]
    normal = [i for i in range(len(y)) if old[i] <= new[i]]
    loss, excess = new.sum() / len(y), None
    if abnormal and normal:
        excess = sum(variations[abnormal]) / len(abnormal) - sum(variations[normal]).detach() / len(normal)
        fall = sum(old[i] - new[i] for i in abnormal) / len(abnormal)
        term = loss_weight * fall + logit_weight * excess.clip(min=0)
        loss = loss + len(abnormal) / len(y) * term
    return loss, {"abnormal": abnormal, "variations": variations.detach(), "excess": excess}


def sora(net, ball, linearity, noise, part, x, y, rate, *, longest, scale, curvature, share):
    """`linearity` is a list with K, which changes."""
    start = ball.project(x + noise, x)
    gradient, _ = input_gradients(net, start, y, training=True)
    size = scale * longest * min(1.0, curvature / (1 - linearity[0]))
    inputs = (start + size * part * ball.direction(gradient)).clip(0, 1).requires_grad_()
    logits = net(inputs, True)
    loss = losses(logits, y).sum() / len(y)
    gradients, (at_end,) = net.gradients(loss, inputs)
    ratios = []
    for g, direction, end in zip(gradient, ball.direction(gradient), len(y) * at_end, strict=True):
        length = g.abs().sum() if ball.norm == "linf" else (g * g).sum().sqrt()
        ratios.append(float((direction * end).sum() / length))
    net.descend(gradients, rate)
    k = min(max(sum(ratios) / len(ratios), -1.0), 1.0)
    linearity[0] = (1 - share) * linearity[0] + share * k
    return Outcome(inputs.detach(), loss.detach(), logits.detach(), [gradients], {"k": k, "size": size})
