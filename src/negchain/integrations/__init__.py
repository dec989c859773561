"""negchain's losses inside the tools people train with; each needs that tool installed.

| file | for |
|---|---|
| `sentence_transformers.py` | `SentenceTransformerTrainer`: a loss over a corpus, checkpoints |
| `text_pairs.py` | the positions of its texts |
| `open_clip.py` | open_clip's training loop: loss, CSV and webdataset pipelines |

Lightning, accelerate, lightly and a plain loop need nothing of their own (docs/integrations.md).
"""
