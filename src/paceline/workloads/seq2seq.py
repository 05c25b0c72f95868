"""The model of the translation workload: a GRU reads the sentence, another one writes it, and attention joins them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from paceline.workloads.text import BOS, EOS, PAD


class Attention(nn.Module):
    """Additive attention (Bahdanau et al. 2015): where to look, from what the decoder knows and what was read.

    a_j = softmax_j( v · tanh(Q s + K h_j) ), over the words j of the sentence; padding has the weight 0.

    Args:
        query: width of the decoder's state s.
        key: width of the encoder's states h.
        width: of the sum in between.
    """

    def __init__(self, query: int, key: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(query, width, bias=False)
        self.key = nn.Linear(key, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, state: Tensor, keys: Tensor, real: Tensor) -> Tensor:
        """The weights, (batch, source).

        Args:
            state: of the decoder, (batch, query).
            keys: `self.key` of the encoder's states, (batch, source, width): once for all steps.
            real: which places hold no padding, (batch, source).
        """
        scores = self.score(torch.tanh(self.query(state).unsqueeze(1) + keys)).squeeze(2)
        return torch.softmax(scores.masked_fill(~real, -torch.inf), dim=1)


class Seq2Seq(nn.Module):
    """GRU encoder and decoder with additive attention, after Bahdanau et al. (2015).

    The encoder reads in both directions, as in the paper: German verbs stand at the end, and a word must know what
    follows it. Padding is packed away, so a sentence's states do not depend on its company in the micro-batch. The
    decoder looks from its last state, then steps: c_t = Σ_j a_j h_j, s_t = GRU([e_t, c_t], s_{t−1}). The logits come
    from [s_t, c_t, e_t] through one layer of tanh (the paper: maxout). Widths are far below the paper's 1,000, so that
    one core trains it. There is no dropout: the same micro-batch gives the same gradient on every rank and backend.

    Args:
        source: words of the vocabulary that is read.
        target: words of the vocabulary that is written.
        embedding: width of a word.
        width: of the decoder's state; the encoder's has as much in each direction.

    >>> sum(p.numel() for p in Seq2Seq(7833, 5871).parameters())  # of Multi30k
    1691503
    """

    def __init__(self, source: int, target: int, embedding: int = 64, width: int = 128) -> None:
        super().__init__()
        self.source = nn.Embedding(source, embedding, padding_idx=PAD)
        self.target = nn.Embedding(target, embedding, padding_idx=PAD)
        self.encoder = nn.GRU(embedding, width, batch_first=True, bidirectional=True)
        self.start = nn.Linear(2 * width, width)
        self.attention = Attention(width, 2 * width, width)
        self.decoder = nn.GRUCell(embedding + 2 * width, width)
        self.readout = nn.Linear(width + 2 * width + embedding, embedding)
        self.logits = nn.Linear(embedding, target)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of each word of the translations when the words before it are given (teacher forcing).

        They are (words, vocabulary), sentence after sentence: of 32 random rows of Multi30k 42 % is
        padding, which is left out before the widest layer.

        Args:
            source: sentences with their ends, padded, (batch, source).
            target: translations with their begins and ends, padded, (batch, target).
        """
        states, state, real = self.read(source)
        keys, words = self.attention.key(states), self.target(target[:, :-1])
        steps = []
        for word in words.unbind(1):
            state, context = self.step(word, state, states, keys, real)
            steps.append(torch.cat((state, context, word), dim=1))
        return self.write(torch.stack(steps, dim=1)[target[:, 1:] != PAD])

    def read(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What was read at each word, the decoder's first state, and which places hold no padding."""
        real = source != PAD
        packed = pack_padded_sequence(self.source(source), real.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        read, last = self.encoder(packed)
        states, _ = pad_packed_sequence(read, batch_first=True, total_length=source.shape[1])
        return states, torch.tanh(self.start(torch.cat((last[0], last[1]), dim=1))), real

    def step(self, word: Tensor, state: Tensor, states: Tensor, keys: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """The decoder's next state after this word, and what it looked at."""
        weights = self.attention(state, keys, real)
        context = torch.bmm(weights.unsqueeze(1), states).squeeze(1)
        return self.decoder(torch.cat((word, context), dim=1), state), context

    def write(self, known: Tensor) -> Tensor:
        """Logits of the next word from the decoder's state, what it looked at, and the word before."""
        logits: Tensor = self.logits(torch.tanh(self.readout(known)))
        return logits

    @torch.no_grad()
    def translate(self, source: Tensor, longest: int) -> Tensor:
        """The likeliest word, one after the other, (batch, at most `longest`); behind a sentence's end is padding."""
        states, state, real = self.read(source)
        keys = self.attention.key(states)
        last = torch.full((len(source),), BOS, device=source.device)
        ended = torch.zeros_like(last, dtype=torch.bool)
        written: list[Tensor] = []
        while len(written) < longest and not bool(ended.all()):
            word = self.target(last)
            state, context = self.step(word, state, states, keys, real)
            last = self.write(torch.cat((state, context, word), dim=1)).argmax(1).masked_fill(ended, PAD)
            ended |= last == EOS
            written.append(last)
        return torch.stack(written, dim=1)
