"""Build base models into grpo_lab/bases, or build shipped ones again and exit with 1 if an accuracy differs."""

from __future__ import annotations

import argparse
import sys

from base_models.rebuild import every_recipe, rebuilt, recipes_of, ship, shipped_like
from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.run_config import to_run
from grpo_lab.tasks.shipped import find_shipped

parser = argparse.ArgumentParser(prog="base_models", description=__doc__)
parser.add_argument("overrides", nargs="*", help="Hydra overrides, for example world=sums; all shipped ones without")
what = parser.add_mutually_exclusive_group(required=True)
what.add_argument("--ship", type=int, metavar="N", help="build base models 0 to N-1; those there already stay")
what.add_argument("--rebuild", action="store_true")
arguments = parser.parse_args()
config, choices = compose_with_choices(arguments.overrides)
model = to_run(config).model
agree = True
if arguments.rebuild:
    for compared in rebuilt(shipped_like(model) if arguments.overrides else every_recipe()):
        print(compared.text(), flush=True)
        agree = agree and compared.agrees
else:
    for recipe in recipes_of(model, arguments.ship):
        base = find_shipped(recipe.key()) or ship(choices["model"], recipe)
        print(f"{base.weights}  accuracy {base.report['accuracy']:.3f}", flush=True)
sys.exit(0 if agree else 1)
