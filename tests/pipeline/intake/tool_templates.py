"""Small chat templates that teach tools as families of models do."""

from __future__ import annotations

from pipeline.intake.chat_template import CHATML

HERMES = (
    "{% if tools %}<|im_start|>tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call as <tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[TOOL_CALLS]{% endif %}" + CHATML
LLAMA = (
    "{% if tools %}{{ tools | tojson }} Environment: ipython. "
    'Answer {"name": name, "parameters": values}.{% endif %}' + CHATML
)
