"""What an answer must obey and how its text is read, decided from a body before it is queued."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.intake.errors import InvalidField, UnsupportedField
from pipeline.intake.grammar import GrammarBook, GrammarRefused
from pipeline.intake.schemas import ChatBody, CompletionBody
from pipeline.intake.tool_bodies import NamedTool
from pipeline.intake.tool_calls import ToolRules
from pipeline.intake.tool_dialects import MAX_CALLS, CallNeed, call_grammar, find_dialect
from pipeline.intake.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The grammar of the tokens, empty for none, and the rules of tool calls in the text.

    shows_special: the calls' marker is a control token, so that the text must show those.
    """

    grammar: str = ""
    tools: ToolRules | None = None
    shows_special: bool = False


class AnswerPlanner:
    """Plans answers of one model, whose chat template is `template`."""

    def __init__(self, vocabulary: Vocabulary, template: str) -> None:
        self._vocabulary = vocabulary
        self._dialect = find_dialect(template)
        self._specials = {text for text, _ in vocabulary.special_texts}
        self._grammars = GrammarBook(vocabulary)

    def plan(self, body: ChatBody | CompletionBody) -> AnswerPlan:
        """The plan of a checked body; its grammar is known to compile.

        Raises:
            InvalidField, UnsupportedField: it asks for what cannot be held or read.
        """
        if not isinstance(body, ChatBody):
            return AnswerPlan()
        param = "tools" if body.offered else "response_format"
        try:
            plan = self._tool_plan(body) if body.offered else AnswerPlan(body.form_grammar)
            if plan.grammar:
                self._grammars.check(plan.grammar)
        except GrammarRefused as refused:
            raise InvalidField(param, f"{param} {refused.reason}.") from refused
        if plan.grammar and body.ignore_eos:
            raise InvalidField("ignore_eos", f"ignore_eos cannot go with this {param}.")
        return plan

    def _tool_plan(self, body: ChatBody) -> AnswerPlan:
        dialect = self._dialect
        if dialect is None:
            raise UnsupportedField("tools")
        is_named = isinstance(body.tool_choice, NamedTool)
        need = CallNeed.MUST if is_named or body.tool_choice == "required" else CallNeed.MAY
        is_held = any(function.strict for function in body.offered)
        grammar = ""
        if need is CallNeed.MUST or is_held or not body.parallel_tool_calls:
            max_calls = MAX_CALLS if body.parallel_tool_calls and not is_named else 1
            grammar = call_grammar(dialect, body.offered, self._vocabulary, need, max_calls)
        names = frozenset(function.name for function in body.offered)
        return AnswerPlan(
            grammar, ToolRules(dialect, names, is_named), dialect.marker in self._specials
        )
