"""The paper's studies: its tables and figures, reproduced by name.

`study` has the interface of a study and `run_studies`; `studies` has one module for each table and figure; `published`
has the paper's own numbers; `catalogue` lists the studies without importing torch.
"""
