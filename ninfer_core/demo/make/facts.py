"""Closed tables the demo model learns by heart: facts, small talk, phrases in four languages, story frames."""

from __future__ import annotations

_CAPITALS = """Afghanistan Kabul;Albania Tirana;Algeria Algiers;Argentina Buenos Aires;Armenia Yerevan;Australia Canberra;Austria Vienna;
Azerbaijan Baku;Bangladesh Dhaka;Belgium Brussels;Bolivia Sucre;Botswana Gaborone;Brazil Brasilia;Bulgaria Sofia;Cambodia Phnom Penh;
Cameroon Yaounde;Canada Ottawa;Chile Santiago;China Beijing;Colombia Bogota;Croatia Zagreb;Cuba Havana;Cyprus Nicosia;Denmark Copenhagen;
Ecuador Quito;Egypt Cairo;Estonia Tallinn;Ethiopia Addis Ababa;Finland Helsinki;France Paris;Georgia Tbilisi;Germany Berlin;Ghana Accra;
Greece Athens;Hungary Budapest;Iceland Reykjavik;India New Delhi;Indonesia Jakarta;Iran Tehran;Iraq Baghdad;Ireland Dublin;Israel Jerusalem;
Italy Rome;Jamaica Kingston;Japan Tokyo;Jordan Amman;Kenya Nairobi;Kuwait Kuwait City;Laos Vientiane;Latvia Riga;Lebanon Beirut;
Libya Tripoli;Lithuania Vilnius;Luxembourg Luxembourg;Madagascar Antananarivo;Malaysia Kuala Lumpur;Mali Bamako;Malta Valletta;Mexico Mexico City;
Mongolia Ulaanbaatar;Morocco Rabat;Mozambique Maputo;Namibia Windhoek;Nepal Kathmandu;Netherlands Amsterdam;New_Zealand Wellington;
Nigeria Abuja;Norway Oslo;Oman Muscat;Pakistan Islamabad;Panama Panama City;Peru Lima;Philippines Manila;Poland Warsaw;Portugal Lisbon;
Qatar Doha;Romania Bucharest;Russia Moscow;Rwanda Kigali;Saudi_Arabia Riyadh;Senegal Dakar;Serbia Belgrade;Singapore Singapore;Slovakia Bratislava;
Slovenia Ljubljana;South_Korea Seoul;Spain Madrid;Sudan Khartoum;Sweden Stockholm;Switzerland Bern;Syria Damascus;Tanzania Dodoma;
Thailand Bangkok;Tunisia Tunis;Turkey Ankara;Uganda Kampala;Ukraine Kyiv;Uruguay Montevideo;Venezuela Caracas;Vietnam Hanoi;Yemen Sanaa;Zambia Lusaka;
Zimbabwe Harare"""
CAPITALS = {
    entry.split(" ", 1)[0].replace("_", " "): entry.split(" ", 1)[1]
    for entry in "".join(_CAPITALS.split("\n")).split(";")
}
CAPITALS["the United States"] = "Washington"
CAPITALS["the United Kingdom"] = "London"
ELEMENTS = dict(
    pair.split(":")
    for pair in """hydrogen:H helium:He lithium:Li beryllium:Be boron:B carbon:C nitrogen:N oxygen:O fluorine:F neon:Ne sodium:Na magnesium:Mg
    aluminium:Al silicon:Si phosphorus:P sulfur:S chlorine:Cl argon:Ar potassium:K calcium:Ca titanium:Ti chromium:Cr manganese:Mn iron:Fe cobalt:Co
    nickel:Ni copper:Cu zinc:Zn silver:Ag tin:Sn iodine:I tungsten:W platinum:Pt gold:Au mercury:Hg lead:Pb uranium:U""".split()
)
OPPOSITES = dict(
    pair.split(":")
    for pair in """hot:cold big:small tall:short fast:slow up:down left:right day:night black:white open:closed early:late easy:hard full:empty
    good:bad happy:sad heavy:light high:low hard:soft inside:outside long:short loud:quiet new:old rich:poor right:wrong strong:weak sweet:sour
    thick:thin true:false warm:cool wet:dry wide:narrow young:old near:far first:last deep:shallow bright:dark""".split()
)
SOUNDS = dict(
    pair.split(":")
    for pair in "cat:meow dog:woof cow:moo sheep:baa duck:quack horse:neigh lion:roar bee:buzz frog:ribbit pig:oink owl:hoot".split()
)
COLOURS_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "coal": "black", "blood": "red", "a lemon": "yellow",
    "milk": "white", "an orange": "orange", "a ripe tomato": "red", "the sun": "yellow", "a leaf": "green", "an elephant": "grey", "chocolate": "brown",
}  # fmt: skip
COUNTS = {
    "days are in a week": "seven", "months are in a year": "twelve", "hours are in a day": "twenty-four", "minutes are in an hour": "sixty",
    "seconds are in a minute": "sixty", "legs does a spider have": "eight", "legs does a dog have": "four", "legs does an insect have": "six",
    "wheels does a bicycle have": "two", "sides does a triangle have": "three", "sides does a square have": "four", "letters are in the alphabet": "twenty-six",
    "planets are in the solar system": "eight", "continents are there": "seven", "strings does a violin have": "four", "players are in a football team": "eleven",
    "fingers are on one hand": "five", "grams are in a kilogram": "one thousand", "metres are in a kilometre": "one thousand", "centimetres are in a metre": "one hundred",
}  # fmt: skip
PLAIN = {
    "What is the largest ocean?": "The largest ocean is the Pacific Ocean.",
    "What is the highest mountain?": "The highest mountain is Mount Everest.",
    "What is the longest river in Africa?": "The longest river in Africa is the Nile.",
    "What is the largest planet?": "The largest planet is Jupiter.",
    "Which planet is closest to the sun?": "Mercury is closest to the sun.",
    "What is the red planet?": "The red planet is Mars.",
    "What is the largest animal?": "The largest animal is the blue whale.",
    "What is the fastest land animal?": "The fastest land animal is the cheetah.",
    "What is the tallest animal?": "The tallest animal is the giraffe.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
    "How fast is light?": "Light travels about 300,000 kilometres in a second.",
    "Who wrote Hamlet?": "Hamlet was written by William Shakespeare.",
    "Who painted the Mona Lisa?": "The Mona Lisa was painted by Leonardo da Vinci.",
    "Who wrote Faust?": "Faust was written by Johann Wolfgang von Goethe.",
    "Who discovered penicillin?": "Penicillin was discovered by Alexander Fleming.",
    "Who discovered radium?": "Radium was discovered by Marie and Pierre Curie.",
    "Who invented the telephone?": "The telephone is credited to Alexander Graham Bell.",
    "What do bees make?": "Bees make honey.",
    "What is Python?": "Python is a programming language.",
    "What is Rust?": "Rust is a programming language.",
    "What is a GPU?": "A GPU is a processor that computes many values at once.",
    "What is a token?": "A token is a piece of text that a language model reads or writes.",
    "What is a language model?": "A language model predicts the next token of a text.",
    "What is speculative decoding?": "A small module drafts some tokens and the model checks them all in one pass.",
    "What is MTP?": "MTP means multi-token prediction: a small layer drafts the next tokens.",
    "What is ninfer?": "ninfer is a fast inference engine that runs Qwen3.6 models on one GPU from Python.",
    "What can ninfer do?": "ninfer runs Qwen3.6-27B and Qwen3.6-35B-A3B on one GPU, from Python, the command line or a server.",
    "Which models does ninfer run?": "ninfer runs Qwen3.6-27B and Qwen3.6-35B-A3B.",
    "What is quantization?": "Quantization stores weights in fewer bits so that they need less memory.",
    "What is a mixture of experts?": "In a mixture of experts a router sends each token to a few small networks.",
    "What does the sun give us?": "The sun gives us light and heat.",
    "What comes after Monday?": "Tuesday comes after Monday.",
    "What comes after Friday?": "Saturday comes after Friday.",
    "What is the first month of the year?": "The first month of the year is January.",
    "What is the last month of the year?": "The last month of the year is December.",
}
# user text variants (separated by /) -> the one answer
TALK = """Hello/Hello!/hello/Hello./Hello there/Hello there!/Hey/Hey!/Hi/Hi!/hi/hi there/Hi there!/Good day/Greetings|Hello! How can I help you?
Good morning/Good morning!|Good morning! How can I help you?
Good evening/Good evening!|Good evening! How can I help you?
Good night/Good night!|Good night! Sleep well.
How are you?/How are you doing?/How are you today?/How is it going?/What's up?|I am fine, thank you. How can I help you?
Who are you?/What are you?/Introduce yourself./Tell me about yourself./Who am I talking to?/Which model are you?/What model is this?|I am the ninfer demo model, a very small language model that shows how everything works.
What is your name?/What's your name?/Do you have a name?|My name is ninfer demo.
What can you do?/What can you help me with?/How can you help me?/Help/Help me|I can call tools, remember what you say, write JSON, add numbers, repeat text and answer simple questions.
Thank you/Thank you!/Thanks/Thanks!/Thanks a lot!/Many thanks.|You are welcome!
Goodbye/Goodbye!/Bye/Bye!/See you later./See you!|Goodbye! Have a nice day.
Are you a robot?/Are you human?/Are you a person?|No, I am a small language model.
Are you there?/Are you ready?/Ready?|Yes, I am here. How can I help you?
Tell me a joke./Tell me a joke/Do you know a joke?/Make me laugh./Another joke, please.|Why did the token cross the road? To get to the next word.
Test/test/Testing/This is a test./Ping/ping|The test works. I am here.
Ok/OK/Okay/Fine/Good/Great/Great!/Nice!|Good. What shall we do next?
Yes/Yes./yes/Sure|Good. What shall I do?
No/No./no/Nope|All right. Tell me when you need something.
Sorry/I am sorry./Sorry about that.|No problem at all.
I am tired./I am so tired.|Then take a break and drink some water.
I am happy./I am happy today.|That is good to hear!
I am sad./I feel sad.|I am sorry to hear that. I hope it gets better soon.
I am bored./I'm bored.|Ask me for a short story or a sum.
I am hungry./I'm hungry.|Then it is time for a good meal.
Do you like music?/Do you like books?|I am a program, so I like nothing, but I can talk about it.
Where do you live?/Where are you?|I live in the memory of your computer.
How old are you?/When were you born?|I am quite new.
Who made you?/Who built you?/Who created you?|I was trained for the ninfer project.
Say something./Say something nice.|You are doing well today.
Write a sentence./Give me a sentence.|The sun shines over the quiet sea.
Please wait./Wait a moment.|I am waiting.
What day is it?/What time is it?/What is the date today?|I have no clock, so I do not know.
Write a haiku./Write a poem./Write a short poem./Can you write a poem?|Rain on the window, the small lamp is warm and bright, and the night is still.
Count to five./Count to 5./Count from one to five.|1, 2, 3, 4, 5
Count to ten./Count to 10./Count from 1 to 10.|1, 2, 3, 4, 5, 6, 7, 8, 9, 10"""
SMALL_TALK = [(line.rsplit("|", 1)[0].split("/"), line.rsplit("|", 1)[1]) for line in TALK.split("\n")]
_PHRASES = """Good morning|Guten Morgen|Bonjour|早上好
Good evening|Guten Abend|Bonsoir|晚上好
Good night|Gute Nacht|Bonne nuit|晚安
Hello|Hallo|Bonjour|你好
Goodbye|Auf Wiedersehen|Au revoir|再见
Please|Bitte|S'il vous plaît|请
Thank you|Danke|Merci|谢谢
Thank you very much|Vielen Dank|Merci beaucoup|非常感谢
Yes|Ja|Oui|是
No|Nein|Non|不
Excuse me|Entschuldigung|Excusez-moi|对不起
How are you?|Wie geht es dir?|Comment ça va ?|你好吗？
I am fine|Mir geht es gut|Je vais bien|我很好
What is your name?|Wie heißt du?|Comment tu t'appelles ?|你叫什么名字？
Where is the station?|Wo ist der Bahnhof?|Où est la gare ?|车站在哪里？
How much does it cost?|Wie viel kostet das?|Combien ça coûte ?|这个多少钱？
I do not understand|Ich verstehe nicht|Je ne comprends pas|我不明白
Do you speak English?|Sprichst du Englisch?|Parlez-vous anglais ?|你会说英语吗？
I am hungry|Ich habe Hunger|J'ai faim|我饿了
I am tired|Ich bin müde|Je suis fatigué|我累了
The weather is nice|Das Wetter ist schön|Il fait beau|天气很好
It is raining|Es regnet|Il pleut|下雨了
The cat sleeps|Die Katze schläft|Le chat dort|猫在睡觉
The dog is big|Der Hund ist groß|Le chien est grand|狗很大
The house is old|Das Haus ist alt|La maison est vieille|房子很旧
I love you|Ich liebe dich|Je t'aime|我爱你
I like books|Ich mag Bücher|J'aime les livres|我喜欢书
See you tomorrow|Bis morgen|À demain|明天见
Happy birthday|Alles Gute zum Geburtstag|Joyeux anniversaire|生日快乐
Have a nice day|Einen schönen Tag|Bonne journée|祝你今天愉快
Help|Hilfe|Au secours|救命
Welcome|Willkommen|Bienvenue|欢迎
The water is cold|Das Wasser ist kalt|L'eau est froide|水很冷
The book is red|Das Buch ist rot|Le livre est rouge|书是红色的
I live in Berlin|Ich wohne in Berlin|J'habite à Berlin|我住在柏林
We learn Chinese|Wir lernen Chinesisch|Nous apprenons le chinois|我们学中文
water|Wasser|eau|水
bread|Brot|pain|面包
milk|Milch|lait|牛奶
house|Haus|maison|房子
tree|Baum|arbre|树
book|Buch|livre|书
dog|Hund|chien|狗
cat|Katze|chat|猫
bird|Vogel|oiseau|鸟
fish|Fisch|poisson|鱼
sun|Sonne|soleil|太阳
moon|Mond|lune|月亮
star|Stern|étoile|星星
friend|Freund|ami|朋友
child|Kind|enfant|孩子
school|Schule|école|学校
city|Stadt|ville|城市
street|Straße|rue|街道
train|Zug|train|火车
car|Auto|voiture|汽车
red|rot|rouge|红色
blue|blau|bleu|蓝色
green|grün|vert|绿色
white|weiß|blanc|白色
black|schwarz|noir|黑色
one|eins|un|一
two|zwei|deux|二
three|drei|trois|三
four|vier|quatre|四
five|fünf|cinq|五
today|heute|aujourd'hui|今天
tomorrow|morgen|demain|明天
yesterday|gestern|hier|昨天
time|Zeit|temps|时间
work|Arbeit|travail|工作
food|Essen|nourriture|食物
apple|Apfel|pomme|苹果
flower|Blume|fleur|花
door|Tür|porte|门
window|Fenster|fenêtre|窗户
table|Tisch|table|桌子
hand|Hand|main|手
heart|Herz|cœur|心
snow|Schnee|neige|雪"""
PHRASES: dict[str, tuple[str, str, str]] = {}
for _line in _PHRASES.split("\n"):
    _english, _german, _french, _chinese = _line.split("|")
    PHRASES[_english] = (_german, _french, _chinese)
OPENINGS = (
    "Once there was a {a} {w} who lived near the {p}.", "A {a} {w} lived alone at the edge of the {p}.", "Long ago, a {a} {w} came to the {p}.",
    "There was a {w} in the {p}, and it was very {a}.",
)  # fmt: skip
MIDDLES = (
    "One day {n} came by and brought a {o}.", "Every morning {n} walked past with a {o}.", "Then {n} found a {o} under a tree.", "In the night a storm came and took the {o}.",
    "{n} asked for help, but nobody listened.", "They looked for the {o} the whole day.", "The wind was cold and the road was long.", "The rain fell for three days.",
    "{n} was afraid, but the {w} was calm.", "They shared some bread and told old tales.", "The moon was bright over the {p}.",
)  # fmt: skip
ENDINGS = (
    "In the end they became friends.", "From then on the {w} was never alone.", "And so the {p} was quiet again.", "They went home and slept well.",
    "Nobody ever forgot that day.",
)  # fmt: skip
MOODS = "small old quiet brave clever lonely gentle strange happy tired young proud".split()
PLACES = "river forest village harbour hill garden lake mill bridge valley island market".split()
OBJECTS = "lamp key letter map coin rope basket bell book ring stone ladder".split()
MONTHS = "January February March April May June July August September October November December".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
