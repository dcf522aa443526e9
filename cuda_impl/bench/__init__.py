# SPDX-License-Identifier: Apache-2.0
"""Measuring MoE layers on a CUDA device: `isomoe bench --cuda` and `isomoe tune`.

`data` makes random layers and batches, `reference` says what is right, `roofline` what is possible, `clock` how long
a call takes, `peers` who else can make the call; `run` puts them together and `figures` judges the outcome.
"""
