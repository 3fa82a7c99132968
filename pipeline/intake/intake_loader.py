"""Loads the text side of a model: where its files lie, and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast, get_args

from pipeline.intake.build import Intake
from pipeline.intake.chat_template import ChatTemplate
from pipeline.intake.errors import ModelFilesUnusable
from pipeline.intake.known_models import KnownModel
from pipeline.intake.vocabulary import load_vocabulary
from pipeline.settings import PipelineSettings, split_names

TOKENIZER_FILE = "tokenizer.json"
_Engine = Literal["torch", "digest", "script"]


class IntakeLoader:
    """Makes intakes for the models of one process.

    A model's files lie where it is configured, in `models_dir` under its name, or where its workers
    say, if that is on this machine too.
    """

    def __init__(self, settings: PipelineSettings, models_dir: Path) -> None:
        self._settings = settings
        self._models_dir = models_dir.expanduser().absolute()

    def configured(self, more: dict[str, str]) -> list[KnownModel]:
        """The models of the settings: `model`, if there is one, and `more`, names with their paths."""
        settings = self._settings
        main = KnownModel(
            settings.served_model_name,
            settings.engine,
            (str(settings.model),) if settings.model is not None else (),
            split_names(settings.model_aliases),
        )
        has_main = settings.engine != "torch" or settings.model is not None
        others = (
            KnownModel(name, settings.engine, (path,) if path else ())
            for name, path in more.items()
            if name != main.name
        )
        return [*([main] if has_main else []), *others]

    def load(self, known: KnownModel) -> Intake:
        """The intake of one model; reads files.

        Raises:
            ModelFilesUnusable: its files are not on this machine, or broken.
            OSError, ValueError: a script book cannot be read.
        """
        if known.engine not in get_args(_Engine):
            raise ModelFilesUnusable(Path(known.name), f"engine {known.engine} is not known here")
        engine = cast("_Engine", known.engine)
        settings, path = self._settings, self._find_files(known)
        directory = path if engine == "torch" else None
        file = settings.chat_template if known.name == settings.served_model_name else None
        return Intake(
            load_vocabulary(engine, path),
            ChatTemplate.load(directory, file, takes_kwargs=settings.chat_template_kwargs),
            known.name,
            queue_deadline_s=settings.queue_deadline_s,
            total_deadline_s=settings.total_deadline_s,
            batch_deadline_s=settings.batch_deadline_s,
        )

    def _find_files(self, known: KnownModel) -> Path | None:
        """The first place that has them; None for an engine that needs none."""
        places = [Path(path) for path in known.paths]
        if known.engine == "digest" or (known.engine == "script" and not places):
            return None
        if known.engine == "torch":
            named = (self._models_dir / known.name).resolve()
            if named.is_relative_to(self._models_dir.resolve()):
                places.append(named)
        marker = TOKENIZER_FILE if known.engine == "torch" else ""
        for place in places:
            if (place / marker).exists():
                return place
        looked = ", ".join(str(place) for place in places)
        reason = f"no {marker or 'file'} on this machine; looked in {looked}"
        raise ModelFilesUnusable(Path(known.name), reason)
