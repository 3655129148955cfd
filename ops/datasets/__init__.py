"""Where prompts come from: JSONL, Parquet and Arrow files, Hugging Face folders, functions, reasoning-gym tasks.

A row is a map of plain data with a `prompt`: text, or chat messages `[{"role": "user", "content": "2+3="}]`. Whatever
else the row holds travels with the sample as its task, for the reward function: `{"prompt": "2+3=", "answer": "5"}`.
Rows of public data sets are brought into this shape by `ops.datasets.formats`.
"""

from ops.datasets.bad_rows import BadRow as BadRow
from ops.datasets.bad_rows import RowReport as RowReport
from ops.datasets.config import DataConfig as DataConfig
from ops.datasets.config import names_files as names_files
from ops.datasets.config import split_of as split_of
from ops.datasets.load import Dataset as Dataset
from ops.datasets.load import FileRows as FileRows
from ops.datasets.load import GeneratedRows as GeneratedRows
from ops.datasets.load import load_dataset as load_dataset
from ops.datasets.notes import read_notes as read_notes
from ops.datasets.notes import write_notes as write_notes
from ops.datasets.rewards import check_reward as check_reward
from ops.datasets.rewards import fitting_reward as fitting_reward
from ops.datasets.rows import Row as Row
