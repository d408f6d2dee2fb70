"""Word lists that `corpus.py` draws from; nothing here is a sentence."""

# ruff: noqa: SIM905 - lists of words are read and edited more easily as text.

from __future__ import annotations

NAMES = (
    "Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Klara Leo Maria Nora Oscar Paula Quentin Rosa Simon Tina Udo Vera Walter Xenia "
    "Yara Zoe Alice Bob Carol Dan Eva Frank Grace Henry Iris Jack Kate Liam Mia Noah Olga Peter Ruth Sam Tom Ursula Victor Wendy"
).split()

CITIES = (
    "Paris Rome Berlin London Madrid Vienna Prague Warsaw Oslo Dublin Lisbon Athens Zurich Geneva Milan Hamburg Munich Cologne Tokyo Kyoto "
    "Seoul Beijing Delhi Mumbai Cairo Nairobi Lagos Boston Chicago Dallas Denver Miami Seattle Toronto Montreal Lima Bogota Sydney Perth"
).split()

ZONES = (
    "Europe/Berlin Europe/Paris Europe/London Europe/Rome Asia/Tokyo Asia/Seoul Asia/Delhi Africa/Cairo America/Chicago America/Denver "
    "America/Lima Australia/Perth Australia/Sydney UTC"
).split()

NOUNS = (
    "apple pear plum grape lemon bread cheese butter honey sugar water coffee tea milk river lake forest mountain valley meadow "
    "garden flower tree leaf stone sand cloud rain snow wind storm sun moon star sky house door window roof wall table chair lamp "
    "mirror carpet kitchen street bridge tower castle church market school library train bus car bicycle boat ship plane cat dog "
    "horse cow sheep goat bird fish mouse rabbit fox wolf bear lion tiger king queen farmer baker doctor teacher sailor painter "
    "singer friend child mother father sister brother book letter paper pencil picture story song music dance game ball box bottle "
    "cup plate spoon knife fork key clock"
).split()

ADJECTIVES = (
    "red blue green yellow white black brown grey big small old new young long short high low hot cold warm cool fast slow quick "
    "quiet loud happy sad kind brave clever gentle heavy light bright dark sweet sour fresh dry wet soft hard round flat deep "
    "narrow wide rich poor"
).split()

VERBS = "sees likes finds takes gives sells buys paints carries follows watches hears draws opens closes moves keeps holds".split()

FIELDS = (
    "name age city color size price weight height width length title author year month day hour owner status level score count type code "
    "email phone street country language unit speed volume power rating amount total index label group zone mode team"
).split()

# Text that is not ASCII: characters of two, three and four bytes, so that streams are cut inside characters.
FOREIGN = (
    "你好 世界 谢谢 早上好 中国 学习 今天 天气 很好 こんにちは ありがとう 日本 東京 안녕하세요 감사 Привет мир спасибо Москва да нет "
    "café naïve über Straße schön Mädchen größer élan garçon señor mañana niño Ångström smörgås łódź žluťoučký kůň Ελλάδα καλημέρα "
    "שלום مرحبا नमस्ते สวัสดี"
).split()

EMOJI = "😀 😂 😍 🤔 👍 🎉 🚀 🌍 🌞 🌙 ⭐ 🔥 💧 🍎 🍕 🐱 🐶 🦊 🌲 🌸 ❤️ ✅ ❌ ⚡ 🎵 📚 🏠 🚲 ☕ 🍀".split()

PUNCTUATION = ". , ! ? ; : - + * / = ( ) [ ] { } < > \" ' # % & @ $ ^ _ ~ | \\ ... -> => == != && || :: // ().".split()

ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl pr sh sk sl sp st th tr".split()
VOWELS = "a e i o u a e i o u ai ea io ou".split()
CODAS = " n r s l t m k d x nd rn st".split(" ")
