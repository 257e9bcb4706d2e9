"""What a policy sees in an evaluation."""

from vla_common.keys import DECISION_INDEX, EPISODE_INDEX, IMAGES


class Noting:
    """Notes what the policy sees, by episode and decision: of an image, uint8 ``[H, W, 3]``, what ``keep`` returns."""

    def __init__(self, observe, keep):
        self.observe, self.keep, self.seen = observe, keep, {}

    def __call__(self, td):
        shown = self.observe(td)
        for row, place in enumerate(zip(td[EPISODE_INDEX].tolist(), td[DECISION_INDEX].tolist(), strict=True)):
            if place[0] >= 0:
                self.seen[place] = self.keep(shown[IMAGES][row])
        return shown
