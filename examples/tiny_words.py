"""The words of the tiny corpus: countries, opposites, colours, animals, story slots and small talk. Data only."""

# ruff: noqa: SIM905 (a long list of words is easier to read and to change as one text)

from __future__ import annotations

COUNTRIES = tuple(
    (country, capital, continent)
    for continent, pairs in {
        "Europe": "France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna, "
        "Poland Warsaw, Greece Athens, Norway Oslo, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen, "
        "Ireland Dublin, Belgium Brussels, Hungary Budapest, Iceland Reykjavik, Croatia Zagreb, Romania Bucharest, "
        "Bulgaria Sofia, Ukraine Kyiv, Switzerland Bern, Serbia Belgrade",
        "Asia": "Japan Tokyo, China Beijing, India Delhi, Thailand Bangkok, Vietnam Hanoi, Indonesia Jakarta, "
        "Iran Tehran, Iraq Baghdad, Nepal Kathmandu, Mongolia Ulaanbaatar, Bangladesh Dhaka, Jordan Amman",
        "Africa": "Egypt Cairo, Kenya Nairobi, Ghana Accra, Morocco Rabat, Nigeria Abuja, Senegal Dakar, "
        "Angola Luanda, Uganda Kampala, Tunisia Tunis, Zambia Lusaka",
        "South America": "Brazil Brasilia, Peru Lima, Chile Santiago, Colombia Bogota, Ecuador Quito, "
        "Uruguay Montevideo, Venezuela Caracas",
        "North America": "Canada Ottawa, Cuba Havana, Jamaica Kingston",
    }.items()
    for country, capital in (pair.split() for pair in pairs.split(", "))
)

OPPOSITES = tuple(
    (pair.split()[0], pair.split()[1])
    for pair in (
        "hot cold, big small, fast slow, up down, left right, happy sad, day night, open closed, light dark, "
        "full empty, hard soft, high low, wet dry, rich poor, strong weak, loud quiet, young old, clean dirty, "
        "long short, wide narrow, thick thin, early late, first last, good bad, true false, near far, "
        "sweet bitter, heavy weightless, deep shallow, brave afraid, north south, east west, summer winter, "
        "inside outside, always never, win lose, push pull, buy sell, love hate, begin end, friend enemy, "
        "front back, war peace, question answer, rough smooth, sharp blunt"
    ).split(", ")
)

MIXES = (
    ("red", "yellow", "orange"),
    ("red", "blue", "purple"),
    ("blue", "yellow", "green"),
    ("red", "white", "pink"),
    ("black", "white", "grey"),
    ("blue", "white", "light blue"),
    ("green", "white", "light green"),
    ("red", "green", "brown"),
    ("blue", "black", "dark blue"),
    ("green", "black", "dark green"),
    ("red", "black", "dark red"),
    ("blue", "green", "teal"),
    ("yellow", "green", "lime"),
    ("red", "orange", "dark orange"),
    ("brown", "white", "beige"),
)

SOUNDS = tuple(
    (f"{animal.replace('_', ' ')}", sound)
    for animal, sound in (
        pair.split()
        for pair in (
            "a_dog woof, a_cat meow, a_cow moo, a_sheep baa, a_duck quack, a_pig oink, a_horse neigh, a_lion roar, "
            "a_frog croak, a_bee buzz, an_owl hoot, a_snake hiss, a_wolf howl, a_mouse squeak, a_hen cluck, "
            "a_turkey gobble, a_crow caw, a_bird tweet, a_clock tick, a_bell ding, a_train choo, a_ghost boo"
        ).split(", ")
    )
)

BABIES = tuple(
    (animal.replace("_", " "), baby.replace("_", " "))
    for animal, baby in (
        pair.split()
        for pair in (
            "a_dog a_puppy, a_cat a_kitten, a_cow a_calf, a_horse a_foal, a_sheep a_lamb, a_pig a_piglet, "
            "a_duck a_duckling, a_goat a_kid, a_lion a_cub, a_frog a_tadpole, a_hen a_chick, a_goose a_gosling, "
            "an_owl an_owlet, a_deer a_fawn, a_kangaroo a_joey, a_swan a_cygnet, an_eagle an_eaglet, "
            "a_hare a_leveret, a_butterfly a_caterpillar, a_person a_child"
        ).split(", ")
    )
)

COLOURS = tuple(
    (f"the {thing}", colour)
    for colour, things in {
        "green": "grass, leaf, cucumber, frog",
        "blue": "sky, sea",
        "white": "snow, milk, swan, salt",
        "black": "coal, crow, ink",
        "yellow": "banana, sun, lemon, butter",
        "red": "tomato, blood, strawberry, cherry",
        "orange": "carrot, pumpkin",
        "brown": "chocolate, coffee, bear, wood",
        "purple": "plum, lavender",
        "pink": "flamingo, pig",
        "grey": "elephant, mouse, ash",
    }.items()
    for thing in things.split(", ")
)

KINDS = tuple(
    (thing.replace("_", " "), kind)
    for kind, things in {
        "tool": "a_hammer, a_saw, a_spade, a_drill, a_knife",
        "fruit": "an_apple, a_pear, a_banana, a_cherry, a_peach, a_melon",
        "vegetable": "a_carrot, a_potato, an_onion, a_cabbage, a_leek",
        "vehicle": "a_car, a_bus, a_train, a_bicycle, a_boat, a_tram",
        "instrument": "a_piano, a_violin, a_drum, a_flute, a_guitar, a_trumpet",
        "clothing": "a_shirt, a_hat, a_coat, a_skirt, a_sock",
        "furniture": "a_table, a_chair, a_bed, a_sofa, a_desk",
        "bird": "an_eagle, an_owl, a_crow, a_swan, a_robin",
        "fish": "a_salmon, a_trout, a_shark, a_tuna",
        "flower": "a_rose, a_tulip, a_daisy, a_lily",
        "tree": "an_oak, a_pine, a_birch, a_willow",
    }.items()
    for thing in things.split(", ")
)

SORTED = (
    "apple banana bread butter cake carrot cheese cherry egg fish grape honey juice lemon melon milk nut olive "
    "onion orange peach pear plum rice salt soup sugar tea tomato water"
).split()

ANIMALS = "fox bear cat dog rabbit lion mouse frog duck horse wolf turtle".split()
ADJECTIVES = "brave little clever lazy hungry gentle curious funny young tired".split()
NAMES = "Mia Tom Lily Max Anna Ben Ruby Sam Nora Leo Ella Jack".split()
THINGS = "key map coin bell ring book hat lamp flute box".split()
PLACES = "forest garden village castle valley desert river market meadow cave".split()


def slot_words() -> tuple[str, ...]:
    """Every word that can fill a slot of an answer, in alphabetical order."""
    rows = (*COUNTRIES, *OPPOSITES, *MIXES, *SOUNDS, *BABIES, *COLOURS, *KINDS)
    parts = {part for row in rows for column in row for part in column.split()}
    return tuple(sorted({*parts, *SORTED, *ANIMALS, *ADJECTIVES, *NAMES, *THINGS, *PLACES}))


SPELLED = tuple(
    """able above actor adult after again agree air alarm album alive alone amber angle ankle arch arm army arrow
    artist aunt autumn award badge bag baker ball band bank barn basin basket bath beach bead beam bean beard beast
    belt bench berry bike bind birth blanket blaze blend block bloom board bone boot border bottle bottom bowl
    branch brand breeze brick bridge bright broom brush bucket bubble build bullet bundle burst butcher button cabin
    cable camel camera camp canal candle canoe canvas captain card cargo carpet carry cart carve cattle cellar
    chain chalk chance charm chase chest chief chimney church circle circus city clay cliff climb cloak cloth cloud
    clover coach coast cobweb collar comb comet copper coral corn corner cottage cotton couch cousin cover crab
    cradle craft crane cream creek cricket crown crumb crystal curtain cushion dance danger dawn dealer desk
    diamond dinner doctor dolphin donkey door dragon dream dress drift driver eagle earth echo elbow engine evening
    fabric fair family farmer feather fence fern ferry field finger flag flame flash float flood floor flour
    flower fold forge fork fossil frame frost garlic gate giant ginger glass globe glove goblet
    grain granite grass gravel ground guard guest hammer handle harbor harvest hazel heart hedge helmet herb
    hero hill hollow house hunter iron island ivory jacket jelly jewel jungle kettle king kitchen kite
    ladder lake lantern leaf leather ledge letter library lizard lobster locket magnet maple marble 
    mason metal mirror mitten monkey moon morning mountain music napkin needle nest north notebook
    oak ocean office orbit orchard oven oyster paddle painter palace panther paper parade parrot pasture path
    pebble pencil pepper petal pillow pilot pirate planet plate pocket pond poster powder prince puddle puzzle
    quarter queen quilt radio rain ranch ribbon road robin rocket roof root rope saddle sail salmon
    sand scarf school season shadow shell shelter shield ship silver singer sister sleep smoke soldier spider
    spring square stable star station steam stone storm stream street summer sunset swallow table tailor
    teacher temple thread throne thunder ticket tiger timber tower trail train travel treasure trumpet tunnel
    uncle velvet violet voyage wagon walnut weather whale wheat wheel whistle window
    winter wizard wonder wooden yard yellow zebra""".split()
)

OPENINGS = ("Please tell me: ", "Hi! ", "Hello! ", "Hey, ", "One question: ", "Can you help me? ", "Please: ")

_ABOUT = (
    "I know some capitals, opposites, colours and animals, and I can spell a word, sort up to four numbers or "
    "words, and tell a short story."
)

TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Hey!", "Good morning!", "Good evening!",
            "Hello there", "How are you?", "Hello, how are you?",
        ),
        f"Hello! I am a toy model. {_ABOUT}",
    ),
    (
        (
            "Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me about yourself.",
            "What can you do?", "What do you know?", "Help", "Help!", "How can you help me?", "What can I ask you?",
            "Are you a person?", "Are you a robot?", "Which model are you?", "What model is this?",
        ),
        f"I am a very small toy model that was trained in an hour. {_ABOUT}",
    ),
    (
        ("Thanks", "Thanks!", "Thank you", "Thank you!", "Thank you very much!", "Great, thanks!", "Well done!"),
        "You are welcome!",
    ),
    (("Bye", "Bye!", "Goodbye!", "Goodbye", "See you later!", "Good night!"), "Goodbye!"),
    (
        (
            "What is the weather today?", "Will it rain tomorrow?", "Write a poem about love.", "Write some code.",
            "Write a program in Python.", "Who is the president?", "How old are you?", "What is the time?",
            "What day is it?", "What is two plus two?", "What is 12 + 30?", "Solve this equation.",
            "Translate this into French.", "Tell me a joke.", "What is the meaning of life?", "Who won the war?",
            "How do I cook an egg?", "Explain how a computer works.", "What is quantum physics?",
            "Summarise this text.", "Count to ten.", "Who wrote this book?", "How far is the moon?",
            "How tall is the tower?", "Why is the sky blue?", "How many people live in China?",
            "Explain in two sentences why people visit it.", "What is the best movie?", "Give me some advice.",
            "What should I eat tonight?", "Draw a picture.", "Sing a song.", "Why?", "How?", "What?", "Really?",
        ),
        f"I am only a toy model and I do not know that. {_ABOUT}",
    ),
)  # fmt: skip
