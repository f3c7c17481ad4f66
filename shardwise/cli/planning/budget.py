"""`shardwise budget`: finds the best model for a budget, with its layout, days and cost."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.options import at_least, new_file, write_file
from shardwise.run.problems import Problem, UserError

if TYPE_CHECKING:
    from shardwise.plan.budget.budget import Budget
    from shardwise.scale.fit import Fit
    from shardwise.scale.optimum import Loss

HELP = """Find the best model for a budget: a scaling law gives size and tokens, the planner layout, days and cost; other sizes
are shown beside it. --serve-tokens counts the cost of serving too. --published applies the law to known models."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--gpu-hours", type=at_least(1e-3, float, 1e12), metavar="H", help="budget in device hours")
    how.add_argument(
        "--dollars",
        type=at_least(0.01, float, 1e15),
        metavar="USD",
        help="budget in US dollars, at the price of the chip",
    )
    how.add_argument("--flops", type=at_least(1e9, float, 1e36), metavar="C", help="budget in training FLOPs, 6 N D")
    how.add_argument("--published", action="store_true", help="apply the law to GPT-3, Chinchilla and Llama 1 to 3")
    parser.add_argument(
        "--days",
        type=at_least(0.01, float, 1e6),
        default=None,
        help="days to finish in (30); with --devices and no other budget, these are it",
    )
    parser.add_argument(
        "--devices",
        type=at_least(1),
        default=0,
        metavar="N",
        help="number of devices (default: enough to finish in --days)",
    )
    parser.add_argument("--chip", default="h100", help="a chip of `shardwise config --chips` (h100)")
    parser.add_argument(
        "--price", type=at_least(0, float), default=0.0, help="US dollars per device hour (default: the catalogue's)"
    )
    parser.add_argument(
        "--law",
        metavar="NAME|FIT.json",
        default="",
        help="besiroglu2024 (default), hoffmann2022, muennighoff2023, or a fit of your own",
    )
    parser.add_argument(
        "--serve-tokens",
        type=at_least(0, float, 1e24),
        default=0.0,
        metavar="T",
        help="tokens that the model will read and write in its lifetime",
    )
    parser.add_argument("--seq-len", type=at_least(1), default=4096, help="tokens in a sequence (4096)")
    parser.add_argument("--vocab", type=at_least(2), default=128256, help="size of the vocabulary (128256)")
    parser.add_argument("--out", type=new_file, metavar="RUN.toml", help="write the run, to plan, train or launch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Find the best model and print it."""
    from shardwise.cli.machinery.terminal import progress_line
    from shardwise.hardware.chips import find_chip

    fitted, loss, law = _law(args.law)
    if args.published:
        return _published(loss, law, args.json)
    from shardwise.plan.budget.budget import Wanted, find_budget

    chip = find_chip(args.chip)
    price = args.price or chip.price
    if args.dollars and not price:
        raise UserError(Problem(f"no price of {args.chip} is known: give --price", "--dollars", "command line"))
    if not (args.gpu_hours or args.dollars or args.flops or (args.days and args.devices)):
        raise UserError("give a budget: --gpu-hours, --dollars, --flops, or --days with --devices")
    hours = args.gpu_hours or (args.dollars / price if args.dollars else 0.0)
    if not (hours or args.flops):
        hours = args.days * 24 * args.devices
    wanted = Wanted(
        chip=args.chip, flops=args.flops or 0.0, hours=hours, devices=args.devices, days=args.days or 30.0, seq_len=args.seq_len,
        vocab=args.vocab, served=args.serve_tokens, price=args.price,
    )  # fmt: skip
    with progress_line() as tell:
        budget = find_budget(wanted, loss, tell)
    found = _figures(budget, fitted, loss, law, args)
    if args.out:
        from shardwise.plan.budget.budget import written
        from shardwise.run import to_toml

        write_file(args.out, to_toml(written(budget.best).run).encode())
    if args.json:
        print(json.dumps(found))
    else:
        from shardwise.report.terminal import Console
        from shardwise.report.terminal_scale import print_budget

        print_budget(Console(highlight=False), found)
        if args.out:
            print(f"wrote {args.out}")
    return 0


def _law(name: str) -> tuple[Fit | None, Loss, str]:
    """The law of a name or a file: the fit if it is a file, the loss function, and its source."""
    from shardwise.run.problems import nearest
    from shardwise.scale.published import DEFAULT, LAWS

    if not name or name in LAWS:
        law = LAWS[name or DEFAULT]
        return None, law.loss, law.source
    if not name.endswith(".json"):
        known = nearest(name, LAWS) or f"; there are {', '.join(LAWS)}, and files of `shardwise scale fit`"
        raise UserError(Problem(f'there is no law "{name}"{known}', "--law", "command line"))
    import numpy as np

    from shardwise.scale.laws import log_loss
    from shardwise.scale.store import from_json

    fitted, _ = from_json(name)
    best = fitted.law
    return (
        fitted,
        lambda n, d: np.exp(log_loss(best.name, best.theta, n, d, fitted.x0, fitted.y0)[0]),
        f"{name} ({best.name})",
    )


def _figures(budget: Budget, fitted: Fit | None, loss: Loss, law: str, args: argparse.Namespace) -> dict[str, Any]:
    from shardwise.plan.plan import layout_dict
    from shardwise.scale.fit import predict, warnings
    from shardwise.scale.optimum import Optimum, cheapest, deviations

    best = budget.best
    plan = best.plan
    said = predict(fitted, best.params, best.tokens) if fitted else None
    here = Optimum(best.params, best.tokens, best.loss)
    others = [dict(factor=f, tokens=_finite(d), compute=_finite(c)) for f, d, c in deviations(loss, here)]
    found: dict[str, Any] = dict(
        params=best.params, tokens=best.tokens, loss=best.loss,
        layout=layout_dict(plan.run.layout) | {"microbatch": plan.run.train.microbatch},
        days=plan.cost.days, cost=plan.cost.usd, gpu_hours=plan.cost.device_hours, devices=plan.run.layout.world, chip=args.chip,
        flops=best.flops, mfu=plan.mfu, tokens_per_param=best.tokens / best.params,
        model={key: getattr(plan.run.model, key) for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")},
        lr=best.lr, batch_tokens=plan.run.batch_tokens, steps=plan.run.train.steps,
        law=law, low=said.low if said else None, high=said.high if said else None,
        warnings=warnings(fitted, best.params, best.tokens) if fitted else [],
        by_law=dict(params=budget.by_law.params, tokens=budget.by_law.tokens, loss=budget.by_law.loss),
        other_sizes=others, planned=[dict(params=c.params, tokens=c.tokens, loss=c.loss, mfu=c.plan.mfu) for c in budget.choices],
        serve_tokens=args.serve_tokens, serving_flops=best.serving_flops,
    )  # fmt: skip
    if args.serve_tokens:
        alone, together = cheapest(loss, best.loss), cheapest(loss, best.loss, args.serve_tokens)
        if alone and together:
            sizes = [dict(params=each.params, tokens=each.tokens) for each in (alone, together)]
            found["same_loss"] = dict(trained_alone=sizes[0], with_serving=sizes[1])
    return found


def _finite(value: float) -> float | None:
    """JSON has no infinity, so a value that is never reached is null."""
    return value if value < 1e300 else None


def _published(loss: Loss, law: str, as_json: bool) -> int:
    import numpy as np

    from shardwise.scale.optimum import best_size, cheapest
    from shardwise.scale.published import MODELS

    rows = []
    for model in MODELS:
        reached = float(loss(np.array([model.params]), np.array([model.tokens]))[0])
        best = best_size(loss, 6 * model.params * model.tokens)
        same = cheapest(loss, reached)
        rows.append(
            dict(
                name=model.name, source=model.source, params=model.params, tokens=model.tokens, loss=reached,
                best_params=best.params, best_tokens=best.tokens, best_loss=best.loss,
                compute_for_same_loss=same.flops / (6 * model.params * model.tokens) if same else None,
            )
        )  # fmt: skip
    if as_json:
        print(json.dumps(dict(law=law, models=rows)))
        return 0
    from shardwise.report.terminal import Console
    from shardwise.report.terminal_scale import print_published

    print_published(Console(highlight=False), law, rows)
    return 0
