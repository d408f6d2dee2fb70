"""What the demo model knows about cLLM: each answer with the ways to ask for it."""

from __future__ import annotations

# (answer, questions). The last question of each is held out of training: `score.py` asks it to see whether the model
# knows the answer or only the wording.
ABOUT: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "cLLM is a server that offers large language models over HTTP. It batches all requests step by step.",
        ("What is cLLM?", "Tell me about cLLM.", "Explain cLLM.", "What does cLLM do?", "Describe cLLM.", "What is this server?"),
    ),
    (
        "I am the demo model of cLLM: about two million parameters, made for trying the server and for tests.",
        ("Who are you?", "What are you?", "What model are you?", "Which model is this?", "Introduce yourself.", "Tell me who you are."),
    ),
    (
        "I can greet, answer questions about cLLM, add two numbers, count, copy and edit text, write JSON and call tools.",
        ("What can you do?", "What are you able to do?", "List your abilities.", "Help", "How can you help me?", "What can I ask you?"),
    ),
    (
        "I am a very small model and know nothing of the world. For real answers serve a real model.",
        (
            "What can you not do?",
            "What are your limits?",
            "Are you a good model?",
            "Are you smart?",
            "How good are you?",
            "What are your weaknesses?",
        ),
    ),
    (
        "Get a model file in the GGUF format and run `cllm serve MODEL.gguf`.",
        (
            "How do I use a real model?",
            "How do I load another model?",
            "How do I serve my own model?",
            "How do I change the model?",
            "How can I serve a better model?",
            "How do I use my own model?",
        ),
    ),
    (
        "Run `cllm serve` for this demo model, or `cllm serve MODEL.gguf` for your own.",
        ("How do I start cLLM?", "How do I run the server?", "How do I start the server?", "How do I launch cLLM?", "How to run cLLM?"),
    ),
    (
        "cLLM is for people who want to serve models on their own machine, with one CPU or with a GPU.",
        ("Who is cLLM for?", "Who should use cLLM?", "Who uses cLLM?", "For whom is cLLM made?", "Who is this server for?"),
    ),
    (
        "cLLM is written in Python, with Trio, Quart and Hypercorn. llama.cpp does the computing.",
        (
            "What is cLLM written in?",
            "Which language is cLLM written in?",
            "What is cLLM made of?",
            "Is cLLM written in Python?",
            "Which programming language does cLLM use?",
        ),
    ),
    (
        "No. cLLM does not need PyTorch; llama.cpp computes the model.",
        ("Does cLLM need PyTorch?", "Is PyTorch needed?", "Do I need PyTorch?", "Do I have to install PyTorch?", "Does cLLM use PyTorch?"),
    ),
    (
        "cLLM uses llama.cpp, on the CPU and on the GPU. Other engines can be added as plugins.",
        (
            "Which engine does cLLM use?",
            "What engine computes the model?",
            "Which backend does cLLM use?",
            "What is the backend?",
            "Which inference engine is used?",
        ),
    ),
    (
        "cLLM is free software under the MIT licence.",
        (
            "What licence does cLLM have?",
            "What is the license of cLLM?",
            "Is cLLM free?",
            "Is cLLM open source?",
            "Under which licence is cLLM?",
        ),
    ),
    (
        "Continuous batching forms the batch anew at every step: finished sequences leave and waiting ones enter between two steps.",
        (
            "What is continuous batching?",
            "Explain continuous batching.",
            "How does continuous batching work?",
            "How does cLLM batch requests?",
            "Describe continuous batching.",
        ),
    ),
    (
        "A slot is a place in the backend that one sequence holds while it is computed.",
        ("What is a slot?", "What does slot mean?", "Explain slots.", "What are slots?", "Define slot."),
    ),
    (
        "A cell holds the keys and values of one token. Capacity is counted in cells.",
        ("What is a cell?", "What does cell mean?", "Explain cells.", "What are cells?", "Define cell."),
    ),
    (
        "The KV cache keeps the keys and values of tokens already computed, so that no token is computed twice.",
        ("What is the KV cache?", "What is a KV cache?", "Explain the KV cache.", "What does the KV cache do?", "Describe the KV cache."),
    ),
    (
        "Prefix sharing lets prompts that begin alike use the same cells, so the common part is computed once.",
        (
            "What is prefix sharing?",
            "Explain prefix sharing.",
            "How does prefix sharing work?",
            "What is a shared prefix?",
            "Describe prefix sharing.",
        ),
    ),
    (
        "A radix tree over token ids says which cells begin with which tokens, so that a new prompt finds its longest known prefix.",
        (
            "What is the radix tree?",
            "What is the radix tree for?",
            "Explain the radix tree.",
            "Why is there a radix tree?",
            "How are prefixes found?",
        ),
    ),
    (
        "Preemption sets a running sequence aside when cells run out. It goes on later, and no request fails.",
        (
            "What is preemption?",
            "Explain preemption.",
            "How does preemption work?",
            "What happens when cells run out?",
            "Describe preemption.",
        ),
    ),
    (
        "Chunked prefill cuts a long prompt into parts, so that running sequences do not wait for it.",
        (
            "What is chunked prefill?",
            "Explain chunked prefill.",
            "How does chunked prefill work?",
            "Why is prefill chunked?",
            "Describe chunked prefill.",
        ),
    ),
    (
        "Prefill computes the tokens of the prompt, before the first new token.",
        ("What is prefill?", "Explain prefill.", "What does prefill mean?", "What happens in prefill?", "Define prefill."),
    ),
    (
        "Decode makes the new tokens, one step at a time.",
        ("What is decode?", "Explain decode.", "What does decode mean?", "What happens in decode?", "Define decode."),
    ),
    (
        "A step plans the batch, computes it and applies the result to every sequence.",
        ("What is a step?", "Explain a step.", "What does step mean?", "What happens in a step?", "Define step."),
    ),
    (
        "A sequence is the tokens of one completion.",
        ("What is a sequence?", "Explain sequences.", "What does sequence mean?", "What are sequences?", "Define sequence."),
    ),
    (
        "A row is one token to compute in a step.",
        ("What is a row?", "Explain rows.", "What does row mean?", "What are rows?", "Define row."),
    ),
    (
        "A batch is the rows of one step.",
        ("What is a batch?", "Explain batches.", "What does batch mean?", "What are batches?", "Define batch."),
    ),
    (
        "Logits are the scores of all tokens, before one is sampled.",
        ("What are logits?", "Explain logits.", "What does logits mean?", "What is a logit?", "Define logits."),
    ),
    (
        "A token is a piece of text that the model reads and writes as one number.",
        ("What is a token?", "Explain tokens.", "What does token mean?", "What are tokens?", "Define token."),
    ),
    (
        "The scheduler decides which rows are computed in the next step. It has no thread, clock or socket of its own.",
        (
            "What is the scheduler?",
            "Explain the scheduler.",
            "What does the scheduler do?",
            "How does the scheduler work?",
            "Describe the scheduler.",
        ),
    ),
    (
        "Speculative decoding guesses several tokens ahead and keeps those that the model confirms.",
        (
            "What is speculative decoding?",
            "Explain speculative decoding.",
            "How does speculative decoding work?",
            "What is speculation?",
            "Describe speculative decoding.",
        ),
    ),
    (
        "The seam is the small interface behind which a model computes. Third parties implement it as plugins.",
        ("What is the seam?", "Explain the seam.", "What does seam mean?", "How are backends attached?", "Describe the seam."),
    ),
    (
        "Write a class that fulfils the protocol in `cllm/backend.py` and name it as an entry point `cllm.backends`.",
        (
            "How do I write a plugin?",
            "How do I write a backend?",
            "How do plugins work?",
            "How do I add a backend?",
            "How to make a plugin?",
        ),
    ),
    (
        "cLLM speaks the OpenAI API, and also those of Anthropic, Ollama and the first cLLM.",
        (
            "Which API does cLLM have?",
            "Which APIs are there?",
            "What API does cLLM speak?",
            "Which protocols does cLLM know?",
            "What APIs does cLLM support?",
        ),
    ),
    (
        "Yes. Send chats to `/v1/chat/completions`, as you would to OpenAI.",
        (
            "Does cLLM have an OpenAI API?",
            "Can I use an OpenAI client?",
            "Is there an OpenAI API?",
            "Does the OpenAI client work?",
            "Can I use the OpenAI API?",
        ),
    ),
    (
        "Yes. Send messages to `/v1/messages`, as you would to Anthropic.",
        (
            "Does cLLM have an Anthropic API?",
            "Can I use an Anthropic client?",
            "Is there an Anthropic API?",
            "Does the Anthropic client work?",
            "Can I use the Anthropic API?",
        ),
    ),
    (
        "Yes. The paths under `/api`, such as `/api/chat`, answer as Ollama does.",
        (
            "Does cLLM have an Ollama API?",
            "Can I use an Ollama client?",
            "Is there an Ollama API?",
            "Does an Ollama client work?",
            "Can I use the Ollama API?",
        ),
    ),
    (
        "Ask `/health` whether the engine lives and `/ready` whether it takes requests.",
        (
            "How do I check the health?",
            "Is there a health check?",
            "How do I know that the server is ready?",
            "Which path tells the health?",
            "Where is the health check?",
        ),
    ),
    (
        "Read `/metrics`: it has counters and times in the Prometheus format.",
        (
            "Where are the metrics?",
            "Does cLLM have metrics?",
            "How do I get metrics?",
            "Does cLLM support Prometheus?",
            "How can I see the metrics?",
        ),
    ),
    (
        "Set `stream` to true, and each piece of text comes as a server-sent event.",
        ("How do I stream?", "Does cLLM stream?", "How does streaming work?", "Can I stream the answer?", "How do I get a stream?"),
    ),
    (
        "Start the server with `--api-key` and send the key as a bearer token.",
        (
            "How do I set an API key?",
            "Does cLLM have API keys?",
            "How do I protect the server?",
            "Is there authentication?",
            "How do I use an API key?",
        ),
    ),
    (
        "Yes. Offer tools with the request, and the model may answer with calls of them.",
        ("Does cLLM support tools?", "Can cLLM call tools?", "How do tools work?", "Is there tool calling?", "Does cLLM do tool calls?"),
    ),
    (
        "Yes. Ask for a `response_format`, and a grammar keeps the answer to your JSON schema.",
        (
            "Does cLLM support JSON schemas?",
            "Can the output be constrained?",
            "How do I get structured output?",
            "Does cLLM have grammars?",
            "Does cLLM support structured output?",
        ),
    ),
    (
        "Yes. llama.cpp computes on the CPU or on the GPU; `auto` takes the best that works.",
        ("Does cLLM run on a GPU?", "Can I use a GPU?", "Does cLLM need a GPU?", "Does cLLM run on a CPU?", "Does it work with a GPU?"),
    ),
    (
        "cLLM needs Python 3.11 or newer.",
        (
            "Which Python does cLLM need?",
            "What Python version is needed?",
            "Which version of Python do I need?",
            "Does cLLM run on Python 3.11?",
            "What version of Python does cLLM need?",
        ),
    ),
    (
        "GGUF is the file format of llama.cpp: weights, vocabulary and chat template in one file.",
        ("What is GGUF?", "What is a GGUF file?", "Explain GGUF.", "Which format do models have?", "Describe GGUF."),
    ),
    (
        "llama.cpp is a library in C and C++ that computes language models on many machines.",
        ("What is llama.cpp?", "Explain llama.cpp.", "What does llama.cpp do?", "What is llama cpp?", "Describe llama.cpp."),
    ),
    (
        "Trio is a Python library for concurrent programs in which every task has a nursery.",
        ("What is Trio?", "Explain Trio.", "Why does cLLM use Trio?", "What does Trio do?", "Describe Trio."),
    ),
    (
        "cLLM follows an earlier C++ server of the same name, which lost much of the speed of llama.cpp on the way to HTTP.",
        (
            "Where does cLLM come from?",
            "What is the history of cLLM?",
            "What was the first cLLM?",
            "What was cLLM before?",
            "What is the origin of cLLM?",
        ),
    ),
    (
        "It forms the batch anew at every step, shares prefixes and does no work that grows with history.",
        ("Why is cLLM fast?", "What makes cLLM fast?", "How fast is cLLM?", "How does cLLM save time?", "How is cLLM so fast?"),
    ),
    (
        "The request waits in a bounded queue until there is room. If the queue is full, the server answers 503.",
        (
            "What happens when the server is full?",
            "What happens if there are too many requests?",
            "What if the queue is full?",
            "What happens under load?",
            "What if the server is busy?",
        ),
    ),
    (
        "When the client goes away, the sequence is cancelled and its cells are freed before the next step.",
        (
            "What happens when I disconnect?",
            "What happens when a client goes away?",
            "How do I cancel a request?",
            "Can I cancel a request?",
            "What if a client disconnects?",
        ),
    ),
    (
        "The seed fixes the noise of each token, so the same request gives the same text whatever else runs.",
        ("What does the seed do?", "What is the seed?", "How do I get the same text again?", "What is a seed for?", "Explain the seed."),
    ),
    (
        "At temperature 0 the most likely token is always taken; higher values make the text more random.",
        (
            "What is temperature?",
            "What does the temperature do?",
            "Explain temperature.",
            "What is greedy sampling?",
            "Describe temperature.",
        ),
    ),
    (
        "The cost model measures how long steps of each size take, and the engine plans with it.",
        (
            "What is the cost model?",
            "Explain the cost model.",
            "What does the cost model do?",
            "Why is there a cost model?",
            "Describe the cost model.",
        ),
    ),
    (
        "It is a tiny transformer of the qwen3 architecture, trained on generated text by a script in `tools/demo_model`.",
        ("How were you trained?", "What is your architecture?", "How were you made?", "Who trained you?", "What architecture do you have?"),
    ),
)
