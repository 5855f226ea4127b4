"""Transformers: a second ``train()``, subclasses, and what is refused; the rest is in
test_integration_conformance.py.
"""

import sys
from pathlib import Path

import pytest
from _frameworks import FRAMEWORKS, forget, placed
from _ranks import each_rank

pytestmark = pytest.mark.extras

if sys.version_info < (3, 11):
    pytest.skip("Transformers 5.23 needs Python 3.11", allow_module_level=True)


@each_rank(2)
def test_second_trains_subclasses_and_what_is_refused(tmp_path):
    """A second train(), True for the last checkpoint, arguments that are refused, another subclass
    of Trainer.
    """
    from transformers import Trainer

    from gradcomp.integrations.transformers import Compressed

    class Base(Trainer):
        pass

    class Own(Compressed, Base):
        pass

    folder, trainer_of = str(tmp_path), FRAMEWORKS["transformers"].trainer
    with placed():
        trainer = trainer_of(folder, max_steps=2)
        trainer.train()
        first = trainer.compression
        trainer.train()
        assert trainer.compression is first and first.stats.steps == 4
        first.close()
        forget()
        trainer = trainer_of(folder, max_steps=2, save_strategy="steps", save_steps=2)
        trainer.train()
        trainer.compression.close()
        forget()
        trainer = trainer_of(folder, max_steps=3)
        trainer.train(resume_from_checkpoint=True)  # the last one in the folder
        assert (trainer.compression.step, trainer.compression.stats.steps) == (3, 1)
        trainer.compression.close()
        with pytest.raises(ValueError, match="unknown codec 'ternari'"):
            trainer_of(folder, codec="ternari")
        with pytest.raises(TypeError, match="compression must be a dictionary of .*, got int"):
            trainer_of(folder, compression=3)
        with pytest.raises(TypeError, match=r"pass advanced=gradcomp.Advanced\(quality_every="):
            trainer_of(folder, compression={"quality_every": 3})
        forget()
        saves = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
        trainer = trainer_of(folder, codec="auto", max_steps=1, kind=Own, **saves)
        trainer.train()
        assert isinstance(trainer, Base) and trainer.compression.stats.steps == 1
        saved = Path(folder, "checkpoint-1")
        assert saved.is_dir() and not list(saved.glob("gradcomp*"))
        trainer.compression.close()
