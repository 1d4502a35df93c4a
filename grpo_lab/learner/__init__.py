"""Stages 7 to 10: from a rollout batch to optimiser steps, and the metrics of a step."""
