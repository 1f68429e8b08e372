"""Optimizers and learning-rate schedules; :mod:`~astrai_train.optim.lr_schedule` needs no torch."""
