"""sentence-transformers: lines marked (*) differ from MultipleNegativesRankingLoss.

Shows    a corpus from which the loss proposes negatives, corrected by their probabilities; the loss
         in the trainer's checkpoints; resuming from them. The model is tiny and nothing is
         downloaded; to train a real one, give its folder or name as the first argument.
Prints   the trainer's log and the estimate of the global loss.

    python examples/with_sentence_transformers.py sentence-transformers/all-MiniLM-L6-v2
"""

import sys
import tempfile

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

from negchain import ImportanceLoss, Informed
from negchain.integrations.sentence_transformers import NegchainTrainer, PairLoss, index_pairs

WORDS = [f"word{i}" for i in range(200)]


def tiny_model() -> SentenceTransformer:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=32)], device="cpu")


def main(model: SentenceTransformer, folder: str, steps: int, resume: bool) -> NegchainTrainer:
    queries, documents = WORDS[:100], [f"{WORDS[i]} {WORDS[i + 100]}" for i in range(100)]
    dataset = Dataset.from_dict({"query": queries, "document": documents})
    corpus = [f"{a} {b}" for a, b in zip(WORDS, WORDS[50:], strict=False)]
    pairs = index_pairs(dataset, corpus)  # (*) every text gets its position
    loss_fn = ImportanceLoss(  # (*) instead of the batch's own softmax
        len(pairs.anchors), 20.0, Informed(num=16, share=0.9, sharpness=0.5, alone=True),  # (*)
        views="paired", denominator="all", num_keys=len(pairs.keys),  # (*)
    )  # fmt: skip
    loss = PairLoss(model, loss_fn, pairs)  # (*) was: MultipleNegativesRankingLoss(model)
    rate = 0.02 if isinstance(model[0], StaticEmbedding) else 5e-5  # 0.02 collapses a transformer
    args = SentenceTransformerTrainingArguments(
        folder, max_steps=steps, save_steps=20, per_device_train_batch_size=8, learning_rate=rate,
        logging_steps=20, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = NegchainTrainer(  # (*) was: SentenceTransformerTrainer; keeps the loss's state
        model=model, args=args, train_dataset=pairs.dataset, loss=loss  # (*) was: dataset
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    for steps, resume in ((20, False), (40, True)):
        model = SentenceTransformer(sys.argv[1]) if len(sys.argv) > 1 else tiny_model()
        print(main(model, folder, steps, resume).loss.loss_fn.info)
