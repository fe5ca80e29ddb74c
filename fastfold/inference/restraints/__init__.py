"""Distance restraints from experiments, obeyed by springs in a descent or by a learned bias of the input features."""

from fastfold.inference.restraints.file import CROSSLINKERS, read_restraints
from fastfold.inference.restraints.fit import fit_restraints
from fastfold.inference.restraints.report import RestraintReport
from fastfold.inference.restraints.restraint import Restraint

__all__ = ["CROSSLINKERS", "Restraint", "RestraintReport", "fit_restraints", "read_restraints"]
