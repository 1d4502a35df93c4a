"""Diagnoses a training log of any trainer: what went wrong, since which step, and what to try.

    signals.py      numbers of a log as series in which high is bad; the onset of a change with its interval
    rules.py        the rules: what each looks at, what it cannot say, what to try
    thresholds.json thresholds and false alarms, from the recorded runs: `analysis/doctor_thresholds` writes it
    diagnosis.py    the rules applied to a log
    command.py      `grpo-lab doctor`: text, JSON, HTML (page.html)

A threshold is the highest, over recorded experiments, of the 95% quantile of their healthy runs. No module here imports
torch.
"""
