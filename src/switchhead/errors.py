"""The errors that a user can cause and mend; the command line prints them as one line."""


class SwitchHeadError(Exception):
    """Something outside the program is wrong: a file, a directory, a setting. The message names it and the fix."""


class DataError(SwitchHeadError):
    """Text that cannot be read, is empty, or is too short."""


class RunError(SwitchHeadError):
    """A run directory that does not fit what is asked of it."""


class CheckpointError(RunError):
    """A checkpoint that cannot be written or read, or belongs to something else."""


class TrainingError(SwitchHeadError):
    """Training that cannot go on."""


class DeviceError(SwitchHeadError):
    """A device that is needed and not here."""
