"""Personal data of our own making, each value once: written down, or made with a right checksum from a fixed seed."""

import random
import string

EMAILS = """a@b.co joe.bloggs+tag@mail.example.com 用户@例子.广告 jürgen@müller.de x_y@ex-ample.org иван@пример.рф
o'neil@foo.ie first.last@sub.domain.example.museum 1234@numbers.net δοκιμή@παράδειγμα.ελ user%x@host.example
very-long-local-part-0123456789@example.info UPPER@EXAMPLE.COM a.b.c.d@e.f.g.org test@xn--bcher-kva.xn--p1ai
josé.muñoz@correo.es søren_aa@blåbær.dk łukasz@poczta.pl zoë@site.nl 山田太郎@例え.jp 김철수@도메인.한국
info@straße.example marta.o@uni-köln.de r2d2@droids.io ann@a1.io bob-smith@my-company.co.uk sales@shop24.eu x@y.zz
team+news@list.example.org abuse@123.example çelik@firma.tr þór@vefur.is first_last@dept.cs.univ.edu
nguyễn@thư.vn""".split()

IPV4 = """192.168.0.1 8.8.8.8 255.255.255.255 10.0.0.7 172.16.254.3 203.0.113.195 198.51.100.42 100.64.0.99
127.0.0.1 93.184.216.34 169.254.10.20 224.0.0.251""".split()
IPV6 = """2001:db8::1 ::1 fe80::1ff:fe23:4567:890a 2001:0db8:85a3:0000:0000:8a2e:0370:7334 ::ffff:192.0.2.128
2001:db8:1:2:3:4:5:6 64:ff9b::192.0.2.33 2607:f0d0:1002:51::4 FE80::0202:B3FF:FE1E:8329 ff02::1 ff05::1:3 2001:db8::
2a00:1450:4001:82a::200e fd12:3456:789a:1::1 1::8 1:2:3:4:5:6:7:: ::2:3:4:5:6:7:8 2001:db8::8:800:200c:417a
2620:fe::fe ::ffff:0:203.0.113.7 2001:db8:a:b:c:d:192.0.2.1 fc00::7 2400:cb00:2048:1::c629:d7a2""".split()

PHONES = """+49 30 1234567|(212) 555-0123|212-555-0124|212.555.0125|1-800-555-0199|020 7946 0958|07700 900123
01 42 68 53 00|01.42.68.53.01|030/1234567|0170-1234567|03-1234-5678|090-1234-5678|138 1234 5678|98765 43210
(02) 9876 5432|0412 345 678|(11) 91234-5678|8 (495) 123-45-67|+1 (415) 555-2671|+44 (0)20 7946 0959
0044 20 7946 0958|+86 138 1234 5678|+33 1 42 68 53 00|06 1234 5678|044 123 45 67|08-123 456 78|(030) 1234567
+4915112345678|089 / 123 45 67|+55 11 91234-5678|612 34 56 78|415-555-2671|+81-3-1234-5678|+91 98765 43210
0161 496 0999|+39 06 698 12345|+7 495 123-45-67|02-1234-5678|+61 2 9876 5432|(650) 555 0100|+27 11 123 4567
+48 22 123 45 67|+31 20 123 4567|+34 912 345 678|+351 21 123 4567|+46 8 123 456 78|+47 22 12 34 56|+45 33 12 34 56
+358 9 123 4567|+43 1 234 5678|+41 44 123 45 67|+32 2 123 45 67|+353 1 234 5678|+30 21 0123 4567|+90 212 123 45 67
+972 3-123-4567|+971 4 123 4567|+20 2 12345678|+234 1 234 5678|+254 20 123 4567|+52 55 1234 5678|+54 11 1234-5678
+56 2 1234 5678|+57 1 234 5678|+82 2-123-4567|+65 6123 4567|+60 3-1234 5678|+63 2 8123 4567|+64 9 123 4567
+1-613-555-0142|+1.604.555.0177|(416) 555-0198|011 49 30 7654321|00 33 1 42 68 53 99|0033 1 42 68 53 98
07911 123456|0131 496 0123|(0117) 496 0345|06 12 34 56 79|07-98-76-54-32|0221 9876543|0151 23456789|0711/7654-321
06-6123-4567|080-9876-5432|0120-123-456|159-8765-4321|(21) 3456-7890|8 800 555-35-35|99887 66554
0298 765 432""".replace("\n", "|").split("|")

IN_CONTEXT = """Tel.: 912 345 678|phone: 555-0123|call 5550123 today|Fax 12 34 56 78|mobile 20123456|Telefon 4567890
Tél. 04 78 12 34 56|teléfono 93 123 45 67|telefone: 3123-4567|WhatsApp 61234567|contact us at 5559876""".replace(
    "\n", "|"
).split("|")

# What follows the check digits; letters and digits where the country's own format has them (ISO 13616).
IBAN_BODIES = """DE370400440532013000 GBWEST12345698765432 FR20041010050500013M02606 NLABNA0417164300
CH00762011623852957 ES21000418450200051332 ITX0542811101000000123456 AT1904300234573201 BE539007547034
PL109010140000071219812874 SE50000000058398257466 NO86011117947 DK00400440116243 FI12345600000785
PT000201231234567890154 IEAIBK93115212345678 LU0019400644750000 GR01101250000000012300695 CZ08000000192000145399
SK12000000198742637541
HU117730161111101800000000 ROAAAA1B31007593840000 BGBNBG96611020345678 HR10010051863000160 SI263300012039086
EE2200221020145685 LVBANK0000435195001 LT1000011101001000 MTMALT011000012345MTLCAST001S CY002001280000001200527600
TR0006100519786457841326 SA80000000608010167519 AE0331234567890123456 IL0108000000099999999
IS0159260076545510730339""".split()

KEYS = """AKIAIOSFODNN7EXAMPLE ASIAY34FZKBOKMUTVV7A ghp_16C7e42F292c6912E7710c838347Ae178B4a
gho_aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hI6 ghs_Zx9Yw8Vu7Ts6Rq5Po4Nm3Lk2Ji1Hg0Fe9Dc8
github_pat_11ABCDEFG0123456789_abcdefghijklmnopqrstuvwxyz glpat-Ab12Cd34Ef56Gh78Ij90
sk-abcdEFGH1234ijklMNOP5678 sk-proj-A1b2C3d4E5f6G7h8I9j0K1l2 sk-ant-api03-Zx9Yw8Vu7Ts6Rq5Po4Nm3
sk_live_4eC39HqLyjWDarjtT1zdp7dc pk_test_TYooMQauvdEDq54NiTphI7jx rk_live_51H8a2B3c4D5e6F7g8H9
xoxb-123456789012-abcdefABCDEF xoxp-98765432109-12345678901-aBcDeF
AIzaSyA1234567890abcdefghijklmnopqrstuv ya29.a0AfH6SMBx7Yz9Qw2Er4Ty6Ui8Op
hf_AbCdEfGhIjKlMnOpQrStUvWxYz12345678 npm_aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hI6
SG.aBcDeFgHiJkLmNoP12345q.ZyXwVuTsRqPoNmLkJiHgFeDcBa0987654321 shpat_0123456789abcdef0123456789abcdef
dop_v1_0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
pypi-AgEIcHlwaS5vcmcCJDAxMjM0NTY3LTg5YWItY2RlZi0wMTIzLTQ1Njc4OWFiY2RlZg
eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N""".split()

LOOK_ALIKES = """version 1.2.3.4|v1.2.3.4|256.1.1.1|1.2.3.4.5|2024-01-15|15.01.2024|01/02/2024|978-3-16-148410-0
ISBN 0-306-40615-2|1.5, 2.5, 3.5|0.123 0.456 0.789|1 2 3 4 5 6 7 8 9 10|1990-2000|10 000 000|12:34:56|std::vector<int>
ab::cd|@media screen|pkg@1.2.3|p@ssw0rd|3 @ 4.50|1234567890123456|4111 1111 1111 1112|3.14159265358979|1,234,567,890
2021-03-04 12:30:00|20240115123045|RFC 2616|Section 4.2.1.3|00:1A:2B:3C:4D:5E|1.0.0-beta.2|10.5 - 12.5|100 200 300 400
1914-1918|Order no. 12345678|chr1:1000-2000|$1,000,000|5 000 000 000|2001:2002|a::b|01 02 03 04 05|10-20-30|1/2/3/4
192.168.1|0x1234abcd|DE00 1234|Windows 10.0.19041.1|4.4.0-116-generic|12 345 678|ISSN 1234-5678|doi:10.1000/182
1000000000|2^31 = 2147483648|9.81 m/s|17 18 19 20 21|release 5.10.0.1|1.000.000,00|123-45|2020/2021|5551234
1.1.1970 00:00:00|DE89 3704 0044 0532 0130 01|ISBN-13: 978-0-306-40615-7|04/07/1976|2024.05.06|300.1.2.3|1.01.2.3
§ 4.2.1.1|user@localhost|decorator @functools|a@b|12.5.2023 - 13.5.2023|0.5 0.25 0.125|sk-learn and sk-image
the key: value pairs|999-99-9999999|page 12 of 340|2001:db8:zz::1|1:2:3:4:5:6:7:8:9|12:30:45:10|::|foo::bar::baz1
Chrome 120.0.6099.109|ISBN 9780306406157|978 0 306 40615 7|3.5.0-rc1|1.23e-45 6.78e+90|1, 2, 3, 5, 8, 13, 21
2 4 8 16 32 64 128|July 4, 1776|GB82WEST12345698765433|4000000000000001|follow @ann_lee|http://host/@user/12345
550e8400-e29b-41d4-a716-446655440000|sha1 da39a3ee5e6b4b0d3255bfef95601890afd80709""".replace("\n", "|").split("|")


def luhn_digit(digits: str) -> str:
    """The check digit that follows `digits`."""
    doubled = sum(sum(divmod(2 * int(digit), 10)) for digit in digits[::-2])
    return str(-(doubled + sum(map(int, digits[-2::-2]))) % 10)


def cards() -> list[str]:
    """Two numbers of each issuer, each in another grouping."""
    rng, made = random.Random(5), ["378282246310005", "3782 822463 10005", "3714-496353-98431"]
    for prefix in ("4", "41", "49", "51", "52", "53", "54", "55", "2221", "2720", "62", "35", "6011", "65"):
        for join in rng.sample(("", " ", "-"), 2):
            digits = prefix + "".join(rng.choices(string.digits, k=15 - len(prefix)))
            digits += luhn_digit(digits)
            made.append(join.join(digits[i : i + 4] for i in range(0, 16, 4)))
    return made


def ibans() -> list[str]:
    """The bodies with their check digits, every other one in groups of four."""
    made = []
    for number, entry in enumerate(IBAN_BODIES):
        country, body = entry[:2], entry[2:]
        remainder = int("".join(str(int(character, 36)) for character in f"{body}{country}00")) % 97
        whole = f"{country}{98 - remainder:02d}{body}"
        made.append(" ".join(whole[i : i + 4] for i in range(0, len(whole), 4)) if number % 2 else whole)
    return made


POSITIVES = {
    "EMAIL_ADDRESS": EMAILS,
    "IP_ADDRESS": [*IPV4, *IPV6],
    "PHONE_NUMBER": PHONES,
    "IBAN": ibans(),
    "CREDIT_CARD": cards(),
    "API_KEY": KEYS,
}
