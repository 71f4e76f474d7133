"""What trains the weights: the optimizer, with the parameters of the objective, and the schedule."""

from bisect import bisect

import torch
from torch import nn

from .checkpoints import CheckpointTrainer


class ObjectiveTrainer(CheckpointTrainer):
    """A `CheckpointTrainer` that optimizes the parameters of its `criterion` too, and knows `lr_milestones`."""

    def check_optimizers(self) -> None:
        """Refuse what would not reach an optimizer or a schedule that was given ready."""
        args, missed = self.args, []
        if self.optimizer is not None and list(self.criterion.parameters()):
            missed.append(f"the parameters of objective {self.model.config.objective!r}")
        if self.optimizer is not None and args.decay_all:
            missed.append("decay_all")
        if self.lr_scheduler is not None and args.lr_milestones:
            missed.append(f"lr_milestones={args.lr_milestones}")
        if missed:
            raise ValueError(f"optimizers were made without {missed[0]}: leave `optimizers` out, or that.")

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`; parameters of the objective join with their own learning rate and without decay."""
        new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        parameters = list(self.criterion.parameters())
        if new and parameters:
            rate = self.args.learning_rate * self.criterion.learning_rate_factor
            optimizer.add_param_group({"params": parameters, "lr": rate, "weight_decay": 0.0})
            # the stock loop clears the gradients of the model only
            optimizer.register_step_post_hook(lambda *_: self.criterion.zero_grad())
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """As in `Trainer`, or with `args.decay_all` every parameter."""
        if self.args.decay_all:
            return [name for name, _ in model.named_parameters()]
        return super().get_decay_parameter_names(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """As in `Trainer`; with `args.lr_milestones` the learning rate is multiplied by `lr_gamma` after each."""
        milestones, gamma = self.args.lr_milestones, self.args.lr_gamma
        if not milestones or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self._steps_per_epoch is None:
            raise ValueError("lr_milestones are epochs of `train()`: make the scheduler there, or leave them out.")
        steps = [round(epoch * self._steps_per_epoch) for epoch in milestones]
        # not MultiStepLR: a checkpoint would bring back the steps of the run that wrote it
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: gamma ** bisect(steps, step)
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler
