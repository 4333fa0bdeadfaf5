"""What a page of HTML holds."""

import html.parser


class Reader(html.parser.HTMLParser):
    """Elements in their order, (tag, attributes), and the text outside of scripts and styles."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.text, self.scripts, self._inside = [], [], {}, None
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = (tag, dict(attrs)) if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside is None:
            self.text.append(data)
        else:
            self.scripts[self._inside[1].get("id", self._inside[0])] = data

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]
