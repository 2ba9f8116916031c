"""Prices for the resource: the best Lagrangian bound of a network with usages, and choices found on the way.

The prices maximise a cutting-plane model of the dual (Kelley 1960) inside a box around the best ones (Marsten, Hogan and
Blankenship 1975): every choice of the nodes is a cut. Only times at which some choice passed the limit get a price. For given
prices the bound comes from message passing and the choice from its decoding, improved one node at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tapestry.plan.solver.ascent import LARGE, Messages
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.crossover import Mixture
from tapestry.plan.solver.pairs import ROUNDING, Multipliers, largest, proved
from tapestry.plan.solver.tree_contraction import Contraction


class Cutting:
    """Settings of the cutting-plane model of `ascend`."""

    cuts = 150  # choices that the model remembers
    floor = 2e-4  # smallest box, as a part of the bound
    stall = 25  # rounds without progress after which it goes on in another way, or stops
    pace, slow = 0.01, 1e-4  # of steps along the excess: at first, and when they may stop
    news = 3  # times that get a price in one round
    first = 0.3  # of the budget, for messages without new prices
    still = 1e-5  # of the bound: messages that raise it by less have settled
    box = 0.2  # of the gap: how far prices may go at once, at first
    model = 3_000  # units for each cut and active price of the model, about


class Fitting:
    """Settings of the prices that make a choice fit: `force`."""

    gentle = 0.3  # of the time for making a choice fit, at the highest peaks alone
    falls, fall = 10, 4.0  # prices that fall from very high ones, each by this factor
    turns = 6  # rounds of very high prices until a choice keeps to the limit
    turn, far = 3.0, 0.3  # by how much (as a logarithm) prices differ after a round, from this part past the limit
    swell = 1.2  # of what is added to prices, from round to round
    growth = 1.3  # of a price, each time that it was too low to make a choice fit


class Turning:
    """Settings of `ExactPrices`, whose rounds multiply prices."""

    turned, tilt = 24, 1.5  # rounds that multiply prices; by how much at most (as a logarithm)
    ambition, bolder, bold = 0.1, 1.5, 0.5  # of the bound: what a round aims at first; times this when it is better; at most
    patience = 3  # rounds without a better bound until half is aimed at
    raised, rise = 12, 1.3  # rounds of ever higher prices until a choice keeps to the limits
    memory = 0.7  # of the excess of the rounds before
    left, held = 1e-5, 1e-3  # of prices spread evenly, which every time keeps; of all prices, what counts as one
    around = 0.05  # of all prices: how far the model's first ones may be from the best ones
    close = 2e-4  # of the bound: what the model promises at least where another round is worth it


@dataclass(slots=True)
class Prices:
    """The cutting-plane model of the dual; ``price`` is per limit: what using the limit once costs."""

    price: np.ndarray
    best: float = -np.inf
    best_price: np.ndarray = field(default_factory=lambda: np.zeros(0))
    active: list[int] = field(default_factory=list[int])
    costs: list[float] = field(default_factory=list[float])
    over: list[np.ndarray] = field(default_factory=list[np.ndarray])
    box: float = 0.0
    least_box: float = 0.0
    pace: float = 0.0  # of steps along the excess

    def cut(self, cost: float, over: np.ndarray) -> None:
        """Remember a choice; forget the one that says least at the best prices."""
        self.costs.append(cost)
        self.over.append(over.astype(np.float32))
        if len(self.costs) > Cutting.cuts:
            price = self.best_price[self.active]
            value = [c + float(o[self.active] @ price) for c, o in zip(self.costs[:-20], self.over[:-20])]
            k = int(np.argmax(value))
            del self.costs[k], self.over[k]

    def watch(self, over: np.ndarray) -> None:
        """Give a price to the highest peaks that are not near a time that has one."""
        if not len(over):
            return
        near, rest = max(len(over) // 200, 1), over.copy()
        for t in self.active:
            rest[max(0, t - near) : t + near + 1] = -1.0
        for _ in range(Cutting.news):
            t = int(rest.argmax())
            if rest[t] <= 0:
                break
            self.active.append(t)
            rest[max(0, t - near) : t + near + 1] = -1.0
        t = int(over.argmax())
        if over[t] > 0 and t not in self.active:
            self.active.append(t)

    def step(self, over: np.ndarray, least: float) -> None:
        """New prices: by the model, or when that has stalled along the excess (Polyak 1969) from the present ones."""
        if not self.active or not self.costs:
            return
        at = np.array(self.active)
        if self.pace:
            way = over[at] * ((self.price[at] > 0) | (over[at] > 0))
            target = least if np.isfinite(least) else self.best + 0.1 * abs(self.best)
            length = self.pace * max(target - self.best, self.box) / max(float(way @ way), 1e-12)
            self.price = self.price.copy()
            self.price[at] = np.maximum(self.price[at] + length * way, 0.0)
            return
        center = self.best_price[at]
        rows = np.array([o[at] for o in self.over], float)
        found = _model(np.array(self.costs), rows, np.maximum(center - self.box, 0.0), center + self.box)
        self.price = np.zeros_like(self.price)
        self.price[at] = np.maximum(found, 0.0)

    def promise(self) -> float:
        """By how much the model says that the present prices are better than the best ones."""
        rows = np.array([o[self.active] for o in self.over], float)
        return float((np.array(self.costs) + rows @ self.price[self.active]).min()) - self.best

    def judge(self, bound: float, cost: float) -> bool:
        """Keep better prices; widen the box when they are much better, else shrink it; whether they are better."""
        first = not np.isfinite(self.best)
        if first:
            self.box = 0.1 * abs(bound)
            self.least_box = Cutting.floor * abs(cost) * 1e-3
        better = bound > self.best
        if better:
            if not first and bound > self.best + 2e-5 * abs(self.best):
                self.box = min(self.box * 1.3, max(self.box, 0.1 * abs(bound)))
            self.best, self.best_price = bound, self.price
        else:
            self.box *= 0.7
        self.box = max(self.box, Cutting.floor * abs(self.best), self.least_box)
        return better


@dataclass(slots=True)
class Ascent(Prices):
    """Prices whose bound comes from messages."""

    messages: Messages = field(kw_only=True)
    best_message: np.ndarray = field(default_factory=lambda: np.zeros(0), kw_only=True)

    def unary(self) -> np.ndarray:
        """Costs of labels at the present prices."""
        return self.messages.priced(self.price / self.messages.net.usage.unit)

    def excess(self, choice: np.ndarray) -> np.ndarray:
        """Over time, usage above the limit as a part of the limit."""
        m, use = self.messages, self.messages.net.usage
        weight = np.zeros(len(m.net.unary))
        weight[m.label[m.first + choice]] = 1.0
        return (use.of(weight) - use.limit) / use.unit

    def offset(self) -> float:
        """What the limits are worth at the present prices."""
        use = self.messages.net.usage
        return float((self.price * (use.limit / use.unit)).sum())

    def multipliers(self) -> Multipliers:
        """The best ones, for a certificate."""
        return Multipliers(self.best_price / self.messages.net.usage.unit, *self.messages.spread(self.best_message))

    def learn(self, bound: float, choice: np.ndarray) -> np.ndarray:
        """Keep better prices and a cut, from what messages at the present ones say; how far the choice passes the limits."""
        cost, over = self.messages.cost(self.messages.unary, choice)[0], self.excess(choice)
        if self.judge(bound - self.offset(), cost):
            self.best_message = self.messages.message.copy()
        self.cut(cost, over)
        return over


@dataclass(slots=True)
class ExactPrices(Prices):
    """Prices whose bound and choice come from a contraction: the choice is truly the cheapest one at them.

    ``least`` is the cost of the best known choice that keeps to the limits.
    """

    order: Contraction = field(kw_only=True)
    mixture: Mixture = field(kw_only=True)
    budget: Budget = field(kw_only=True)
    least: float = field(default=np.inf, kw_only=True)

    def look(self) -> tuple[float, np.ndarray]:
        """The bound at the present prices, and how far the cheapest choice passes the limits."""
        net, seen = self.order.net, self.mixture.crossing
        unit = net.usage.unit
        now = self.price / unit
        value, label = self.order.least(net.priced(now))
        full = seen.full(label)
        cost, over = seen.cost(full), (seen.used(full) - net.usage.limit) / unit
        worth = float(now @ net.usage.limit)
        bound = value - worth - 100 * ROUNDING * worth
        self.judge(bound, cost)
        self.cut(cost, over)
        self.least = self.mixture.known(self.mixture if self.mixture.add(full, now) else None)
        self.budget.spend(self.order.work)
        return bound, over

    def ended(self) -> bool:
        """Whether the best choice is proved, or the budget over."""
        return proved(self.least, self.best) or self.budget.over()

    def turn(self, budget: Budget) -> None:
        """Multiply prices by what is used too much (exponentiated gradient: Kivinen and Warmuth 1997), in steps that aim at a
        bound a little above the best one (Polyak 1969). Few times matter in the end, but nobody knows which."""
        bound, over = self.look()
        scale = abs(self.best) or self.mixture.crossing.large / LARGE
        if not self.price.any():
            self.price = np.maximum(over, 0.0) ** 2
            self.price = self.price * (0.5 * scale / max(float(self.price.sum()), 1e-300))
        aim, worse, mean = Turning.ambition, 0, over
        for _ in range(Turning.turned):
            if self.ended() or budget.over() or not self.price.any():
                return
            before = self.best
            bound, over = self.look()
            mean, worse = Turning.memory * mean + (1 - Turning.memory) * over, 0 if bound > before else worse + 1
            aim = min(aim * Turning.bolder, Turning.bold) if bound > before else aim
            if worse == Turning.patience:
                aim, worse, self.price = aim / 2, 0, self.best_price if self.best_price.any() else 0.1 * self.price
            held = self.price > Turning.held * self.price.max()
            length = (self.best - bound + aim * scale) / max(float(self.price @ mean**2), 1e-300)
            change = min(length, Turning.tilt / max(largest(mean[held]), 1e-300)) * mean
            some = Turning.left * self.price.sum() / len(over)
            self.price = np.maximum(self.price * np.exp(np.clip(change, -Turning.tilt, Turning.tilt)), some)
            scale = max(scale, abs(self.best))

    def fit(self, budget: Budget) -> None:
        """Raise prices, most where the limit is passed, until a choice, or a mixture of choices, keeps to the limits."""
        self.price = self.best_price + Turning.left * self.best_price.sum() / max(len(self.best_price), 1)
        for _ in range(Turning.raised):
            if np.isfinite(self.least) or budget.over() or not self.price.any():
                return
            _, over = self.look()
            most, whole = float(over.max(initial=0.0)), float(self.price.sum())
            self.price = self.price * np.exp(np.clip(over / max(most, Fitting.far), -Fitting.far, 1.0) * Turning.tilt)
            self.price *= Turning.rise * whole / self.price.sum()

    def refine(self, rounds: int) -> None:
        """The best prices of the model, at the times that have nearly all of the price, and new peaks."""
        whole = float(self.best_price.sum())
        self.active = [int(t) for t in np.flatnonzero(self.best_price > Turning.held * whole)]
        self.price = np.where(self.best_price > Turning.held * whole, self.best_price, 0.0)
        for k in range(rounds):
            if self.ended() or not self.active:
                return
            _, over = self.look()
            self.box = Turning.around * whole if not k else self.box
            self.watch(over)
            self.step(over, self.least)
            self.budget.spend(Cutting.model * len(self.costs) * len(self.active))
            if self.promise() <= Turning.close * abs(self.best):
                return


def _model(costs: np.ndarray, rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The prices in a box that maximise ``min_k costs[k] + rows[k] · prices``."""
    import highspy

    from tapestry.plan.solver.mip import Solver

    n, k = len(low), len(costs)
    scale = max(largest(costs), 1e-300)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = n + 1, k
    lp.col_cost_ = np.append(np.zeros(n), -1.0)
    lp.col_lower_, lp.col_upper_ = np.append(low / scale, -highspy.kHighsInf), np.append(high / scale, highspy.kHighsInf)
    lp.row_lower_, lp.row_upper_ = np.full(k, -highspy.kHighsInf), costs / scale
    matrix = lp.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.arange(k + 1) * (n + 1)
    matrix.index_ = np.tile(np.arange(n + 1), k)
    matrix.value_ = np.hstack([-rows, np.ones((k, 1))]).ravel()
    highs = Solver()
    highs.passModel(lp)
    highs.run()
    value = np.array(highs.getSolution().col_value)
    return value[:n] * scale if len(value) > n else (low + high) / 2


def ascend(
    messages: Messages,
    price: np.ndarray,
    budget: Budget,
    mixture: Mixture,
    sweeps: int = 3,
    rounds: int = 1000,
    forcing: Budget | None = None,
) -> Ascent:
    """Raise the bound until it stalls, meets the best choice or the budget is over.

    Args:
        price: to start from, for each time (of the resource, not per limit).
        mixture: sees every choice, with the prices that it comes from.
        forcing: for raising prices until a choice keeps to the limits, where none is known.
    """
    use = messages.net.usage
    state = Ascent(price * use.unit, messages=messages, best_message=messages.message.copy())
    state.best_price = state.price
    state.active = [int(t) for t in np.flatnonzero(price)]
    unary, least, last, stall = state.unary(), np.inf, -np.inf, 0
    for k in range(rounds):
        bound = _pass(messages, unary, budget if k else budget.share(Cutting.first), sweeps if k else 10 * sweeps)
        choice = messages.descend(unary, messages.decode(unary), 5)
        budget.spend(2 * messages.work)
        over = state.learn(bound, choice)
        least = mixture.see(choice, state.price / use.unit)
        if not k and not np.isfinite(least):
            least = force(state, forcing or budget, mixture)
            over = state.excess(choice)
        if not k and np.isfinite(least):
            state.box = max(state.box, Cutting.box * (least - state.best))
        stall = 0 if state.best > last + 2e-5 * abs(last) or not np.isfinite(last) else stall + 1
        last = state.best if stall == 0 else last
        if stall > Cutting.stall and not state.pace and state.active:
            state.pace, stall, state.price = Cutting.pace, 0, state.best_price
        elif state.pace and stall and stall % 8 == 0:
            state.pace, state.price = state.pace * 0.6, state.best_price
        if proved(least, state.best) or (stall > Cutting.stall and state.pace < Cutting.slow) or budget.over():
            break
        state.watch(over)
        state.step(over, least)
        budget.spend(Cutting.model * len(state.costs) * len(state.active))
        unary = state.unary()
    return state


def _pass(messages: Messages, unary: np.ndarray, budget: Budget, most: int) -> float:
    """Messages there and back, up to so many times while the bound rises; the bound of the last."""
    last = -np.inf
    for _ in range(most):
        messages.sweep(unary, reverse=False)
        bound = messages.sweep(unary, reverse=True)
        budget.spend(2 * messages.work)
        if budget.over() or bound - last <= Cutting.still * abs(bound):
            return bound
        last = bound
    return last


def force(state: Ascent, budget: Budget, mixture: Mixture) -> float:
    """Raise the prices wherever the limit is passed until a choice keeps to it; the least cost known then.

    First prices so high that little else counts, then lower ones, as long as mixing brings a choice that fits; else from the
    best prices upwards, at the highest peaks alone, which costs least, and where that takes too long, wherever there is one.
    Every round's bound counts then, so that the best prices come close meanwhile.
    """
    least = _frugal(state, budget.share(Fitting.gentle), mixture)
    if np.isfinite(least):
        return least
    least = _push(state, budget.share(Fitting.gentle), mixture, gentle=True)
    return least if np.isfinite(least) else _push(state, budget, mixture, gentle=False)


def _frugal(state: Ascent, budget: Budget, mixture: Mixture) -> float:
    """Choices at prices for all times, from very high ones downwards; the least cost known then.

    Times at which a choice passes the limit cost more from then on, the others less (multiplicative weights: Arora, Hazan and
    Kale 2012), so that soon one keeps to it at all times.
    """
    messages, use = state.messages, state.messages.net.usage
    unit, kept = use.unit, messages.message.copy()
    most = float(use.priced(1.0 / unit, len(messages.net.unary)).max(initial=0.0))
    least, level, weight = np.inf, 0.1 * messages.large / max(most, 1e-300), np.ones(len(unit))
    for k in range(Fitting.turns + Fitting.falls if most > 0 else 0):
        price = level * weight / unit
        unary = messages.priced(price)
        _pass(messages, unary, budget, 1 if k else 3)
        choice = messages.descend(unary, messages.decode(unary), 2)
        least, over = mixture.see(choice, price), state.excess(choice)
        budget.spend(2 * messages.work)
        if np.isfinite(least):
            level /= Fitting.fall
        if over.max(initial=0.0) > 0:
            weight = weight * np.exp(np.clip(over / max(float(over.max()), Fitting.far), -1.0, 1.0) * Fitting.turn)
            weight /= weight.mean()
        if budget.over() or (k >= Fitting.turns and not np.isfinite(least)):
            break
    messages.message = kept
    return least


def _push(state: Ascent, budget: Budget, mixture: Mixture, *, gentle: bool) -> float:
    """Prices from the best ones upwards; messages follow them, and every choice is mixed with those before."""
    messages, use = state.messages, state.messages.net.usage
    state.price, unit = state.best_price.copy(), use.unit
    window = max(1, int(np.median(use.hi - use.lo))) if len(use.lo) else 1  # about as long as a usage lasts
    step = 0.02 * max(abs(state.best), 1e-300) * (1.0 if gentle else min(1.0, window / max(len(use.limit), 1)))
    least, best = np.inf, mixture.ranks()
    for _ in range(60 if gentle else 400):
        over = state.excess(best)
        state.watch(over)
        at = np.array([t for t in state.active if over[t] > 0], np.int64) if gentle else _peaks(over, window)
        state.price = state.price.copy()
        state.price[at] = state.price[at] * (1.2 if gentle else Fitting.growth) + step
        step *= Fitting.swell if over.max(initial=0.0) < 0.2 else Fitting.swell**4
        unary = state.unary()
        bound = _pass(messages, unary, budget, 1)
        choice = messages.descend(unary, messages.decode(unary), 2)
        state.learn(bound, choice)
        mixture.see(choice, state.price / unit)
        least = mixture.see(messages.descend(unary, mixture.ranks(), 2), state.price / unit)
        budget.spend(4 * messages.work)
        if np.isfinite(least) or budget.over():
            break
        best = mixture.ranks()
    return least


def _peaks(over: np.ndarray, window: int) -> np.ndarray:
    """The time of the largest excess in each window where there is any."""
    padded = np.append(over, np.full(-len(over) % window, -np.inf)).reshape(-1, window)
    at = np.arange(len(padded)) * window + padded.argmax(axis=1)
    return at[over[at] > 0] if len(over) else at[:0]
