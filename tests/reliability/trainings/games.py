"""Autoencoders, and manual optimization: games of two players, one loss, accumulated gradients."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from reliability.trainings.training import SAMPLES, Module, Player, Training, labels, loader, noise, random, weight_of

FEATURES, LATENT = 4, 2


def unlabeled():
    return loader(random(SAMPLES, FEATURES), labels(2))


class Autoencoder(Module):
    """The step calls encoder and decoder; the forward is for predictions only."""

    expected_predictor = "decoder"

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 5), nn.ReLU(), nn.Linear(5, FEATURES))

    def forward(self, x):
        return self.encoder(x)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        z = self.encoder(x)
        x_hat = self.decoder(z)
        return F.mse_loss(x_hat, x)

    def reference_outputs(self, batch):
        return self.decoder(self.encoder(batch[0]))

    def reference_loss(self, batch):
        return (self.reference_outputs(batch) - batch[0]).pow(2).mean()


class VAE(Module):
    """Draws a latent variable in every step."""

    expected_predictor = "decoder"
    drawn_for_kernel = True
    kl_coeff = 0.1

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh())
        self.fc_mu, self.fc_var = nn.Linear(5, LATENT), nn.Linear(5, LATENT)
        self.decoder = nn.Sequential(nn.Linear(LATENT, 5), nn.Tanh(), nn.Linear(5, FEATURES))

    def forward(self, x):
        return self.decoder(self.fc_mu(self.encoder(x)))

    def _run_step(self, x):
        h = self.encoder(x)
        mu, log_var = self.fc_mu(h), self.fc_var(h)
        q = torch.distributions.Normal(mu, torch.exp(log_var / 2))
        p = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(mu))
        return self.decoder(q.rsample()), p, q

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x_hat, p, q = self._run_step(x)
        kl = torch.distributions.kl_divergence(q, p).mean()
        return F.mse_loss(x_hat, x) + self.kl_coeff * kl

    def reference_outputs(self, batch):
        h = self.encoder(batch[0])
        return self.decoder(self.fc_mu(h) + (self.fc_var(h) / 2).exp() * noise(len(h), LATENT))

    def reference_loss(self, batch):
        h = self.encoder(batch[0])
        mu, log_var = self.fc_mu(h), self.fc_var(h)
        kl = (mu.pow(2) + log_var.exp() - 1 - log_var).mean() / 2
        return (self.reference_outputs(batch) - batch[0]).pow(2).mean() + self.kl_coeff * kl


class GAN(Module):
    """The discriminator's two losses are differentiated one by one, before its step."""

    normalized = ("generator.0",)
    handed = ("err_d_real", "err_d_fake", "err_g")

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(LATENT, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 5), nn.LeakyReLU(0.2), nn.Linear(5, 1))
        self.criterion = nn.BCEWithLogitsLoss()

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch, batch_idx):
        real, _ = batch
        g_opt, d_opt = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = self(torch.randn(len(real), LATENT))
        err_d_real = self.criterion(self.discriminator(real), ones)
        err_d_fake = self.criterion(self.discriminator(fake.detach()), zeros)
        d_opt.zero_grad()
        self.manual_backward(err_d_real)
        self.manual_backward(err_d_fake)
        d_opt.step()
        err_g = self.criterion(self.discriminator(fake), ones)
        g_opt.zero_grad()
        self.manual_backward(err_g)
        g_opt.step()
        self.log_dict({"g_loss": err_g, "d_loss": err_d_real + err_d_fake})

    def configure_optimizers(self):
        players = self.generator, self.discriminator
        return [torch.optim.Adam(player.parameters(), 0.01, betas=(0.5, 0.999)) for player in players]

    def generated(self, batch):
        return self.generator(noise(len(batch[0]), LATENT))

    def judged(self, batch):
        return self.discriminator(batch[0])

    def generator_loss(self, batch):
        return F.softplus(-self.discriminator(self.generated(batch))).mean()

    def discriminator_loss(self, batch):
        fake = self.discriminator(self.generated(batch).detach())
        return F.softplus(-self.judged(batch)).mean() + F.softplus(fake).mean()

    players = {  # noqa: RUF012
        "generator": Player(0, "generator", "generator_loss", "generated", "forward"),
        "discriminator": Player("discriminator.*", "discriminator", "discriminator_loss", "judged", "discriminator"),
    }


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_pre = weight_norm(nn.Conv1d(2, 3, 3, padding=1))
        self.up = weight_norm(nn.ConvTranspose1d(3, 2, 4, 2, padding=1))
        self.conv_post = weight_norm(nn.Conv1d(2, 1, 3, padding=1))

    def forward(self, x):
        x = self.up(F.leaky_relu(self.conv_pre(x), 0.1))
        return self.conv_post(F.leaky_relu(x)).tanh()


class PeriodDiscriminator(nn.Module):
    """Returns a score and the features on the way to it."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([weight_norm(nn.Conv1d(1, 3, 3, 2)), weight_norm(nn.Conv1d(3, 1, 2))])

    def forward(self, x):
        features = [F.leaky_relu(self.convs[0](x), 0.1)]
        features.append(self.convs[1](features[0]))
        return features[1].flatten(1), features


def spectrum(audio):
    """Something like the energy of a few bands."""
    return F.avg_pool1d(audio.pow(2), 2)


class HiFiGAN(Module):
    """Toggles the optimizers; WeightNorm on every convolution, transposed ones among them."""

    normalized = ("generator.conv_pre", "generator.up", "generator.conv_post", "mpd.convs.0", "mpd.convs.1")
    handed = ("loss_d", "loss_g")

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.mpd = Vocoder(), PeriodDiscriminator()

    def forward(self, mel):
        return self.generator(mel)

    def training_step(self, batch, batch_idx):
        mel, audio = batch
        optim_g, optim_d = self.optimizers()
        audio_g = self(mel)

        self.toggle_optimizer(optim_d)
        real, _ = self.mpd(audio)
        fake, _ = self.mpd(audio_g.detach())
        loss_d = (1 - real).pow(2).mean() + fake.pow(2).mean()
        optim_d.zero_grad()
        self.manual_backward(loss_d)
        optim_d.step()
        self.untoggle_optimizer(optim_d)

        self.toggle_optimizer(optim_g)
        _, features = self.mpd(audio)
        score, features_g = self.mpd(audio_g)
        loss_fm = sum(F.l1_loss(g, r.detach()) for g, r in zip(features_g, features))
        loss_g = (1 - score).pow(2).mean() + 2 * loss_fm + 4 * F.mse_loss(spectrum(audio_g), spectrum(audio))
        optim_g.zero_grad()
        self.manual_backward(loss_g)
        optim_g.step()
        self.untoggle_optimizer(optim_g)
        self.log("loss_g", loss_g, prog_bar=True)

    def configure_optimizers(self):
        return [torch.optim.AdamW(part.parameters(), 0.002, betas=(0.8, 0.99)) for part in (self.generator, self.mpd)]

    def spoken(self, batch):
        net = self.generator
        x = F.leaky_relu(F.conv1d(batch[0], weight_of(net.conv_pre), net.conv_pre.bias, padding=1), 0.1)
        x = F.leaky_relu(F.conv_transpose1d(x, weight_of(net.up), net.up.bias, 2, padding=1))
        return F.conv1d(x, weight_of(net.conv_post), net.conv_post.bias, padding=1).tanh()

    def features(self, audio):
        first, second = self.mpd.convs
        hidden = F.leaky_relu(F.conv1d(audio, weight_of(first), first.bias, 2), 0.1)
        return hidden, F.conv1d(hidden, weight_of(second), second.bias)

    def judged(self, batch):
        return self.features(batch[1])[1].flatten(1)

    def generator_loss(self, batch):
        audio, real = self.spoken(batch), [each.detach() for each in self.features(batch[1])]
        fake = self.features(audio)
        matching = sum((f - r).abs().mean() for f, r in zip(fake, real))
        mel = (spectrum(audio) - spectrum(batch[1])).pow(2).mean()
        return (1 - fake[1]).pow(2).mean() + 2 * matching + 4 * mel

    def discriminator_loss(self, batch):
        fake = self.features(self.spoken(batch).detach())[1]
        return (1 - self.judged(batch)).pow(2).mean() + fake.pow(2).mean()

    players = {  # noqa: RUF012
        "generator": Player(["generator.*"], "generator", "generator_loss", "spoken", "forward"),
        "discriminator": Player(1, "mpd", "discriminator_loss", "judged", "mpd"),
    }


def spoken():
    return loader(random(SAMPLES, 2, 4), random(SAMPLES, 1, 8, seed=1).tanh())


def critic_parameters(module):
    return module.critic.parameters()


class ActorCritic(Module):
    """The forward returns what both players compute; each loss uses its own."""

    handed = ("loss (optimizer 0)", "loss (optimizer 1)")

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.actor = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, states):
        return self.actor(states), self.critic(states)

    def training_step(self, batch, batch_idx):
        states, actions, returns = batch
        logits, values = self(states)
        policy = torch.distributions.Categorical(logits=logits)
        advantage = returns - values.squeeze(1)
        losses = {
            "actor": -(policy.log_prob(actions) * advantage.detach()).mean() - 0.01 * policy.entropy().mean(),
            "critic": advantage.pow(2).mean(),
        }
        for optimizer, loss in zip(self.optimizers(), losses.values()):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log_dict(losses)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), 0.01) for part in (self.actor, self.critic)]

    def logits(self, batch):
        return self.actor(batch[0])

    def values(self, batch):
        return self.critic(batch[0])

    def actor_loss(self, batch):
        log_p = self.logits(batch).log_softmax(1)
        advantage = (batch[2] - self.values(batch)[:, 0]).detach()
        entropy = -(log_p.exp() * log_p).sum(1).mean()
        return F.nll_loss(log_p * advantage[:, None], batch[1]) - 0.01 * entropy

    def critic_loss(self, batch):
        return (batch[2] - self.values(batch)[:, 0]).pow(2).mean()

    players = {  # noqa: RUF012
        "actor": Player(0, "actor", "actor_loss", "logits", "forward"),
        "critic": Player(critic_parameters, "critic", "critic_loss", "values", "forward"),
    }


def episodes():
    return loader(random(SAMPLES, FEATURES), labels(3), 2 + random(SAMPLES, seed=2))


class Closure(Autoencoder):
    """One optimizer, whose step gets a closure."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            loss = F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class Accumulated(Autoencoder):
    """A step after every second batch: what is differentiated is half of the loss."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0]) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    def reference_loss(self, batch):
        return super().reference_loss(batch) / 2


TRAININGS = {
    "autoencoder": Training(Autoencoder, unlabeled),
    "VAE": Training(VAE, unlabeled),
    "GAN": Training(GAN, unlabeled),
    "HiFi-GAN": Training(HiFiGAN, spoken),
    "actor-critic": Training(ActorCritic, episodes),
    "closure": Training(Closure, unlabeled),
    "accumulation": Training(Accumulated, unlabeled),
}
