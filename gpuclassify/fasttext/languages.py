"""Names of languages: the two letters of ISO 639-1, and ISO 639-3 with a script (deu_Latn)."""

from __future__ import annotations

from collections.abc import Iterable

# Languages of which the web has much, by ISO 639-1, with their codes of ISO 639-3: also those of
# the one language of a group, such as Mandarin of Chinese, that models have labels for.
_TWO_AND_THREE_LETTERS = """
af=afr am=amh ar=ara,arb as=asm az=aze,azj be=bel bg=bul bn=ben bs=bos ca=cat cs=ces cy=cym da=dan
de=deu el=ell en=eng eo=epo es=spa et=est,ekk eu=eus fa=fas,pes fi=fin fr=fra ga=gle gl=glg gu=guj
he=heb hi=hin hr=hrv hu=hun hy=hye id=ind is=isl it=ita ja=jpn jv=jav ka=kat kk=kaz km=khm kn=kan
ko=kor ku=kur,kmr ky=kir la=lat lo=lao lt=lit lv=lav,lvs mg=mlg,plt mk=mkd ml=mal mn=mon,khk mr=mar
ms=msa,zsm mt=mlt my=mya ne=nep,npi nl=nld nn=nno no=nor,nob or=ori,ory pa=pan pl=pol ps=pus,pbt
pt=por ro=ron ru=rus sd=snd si=sin sk=slk sl=slv so=som sq=sqi,als sr=srp sv=swe sw=swa,swh ta=tam
te=tel tg=tgk th=tha tr=tur tt=tat ug=uig uk=ukr ur=urd uz=uzb,uzn vi=vie yi=yid,ydd yo=yor
zh=zho,cmn
"""
_THREE_LETTERS = {pair[:2]: pair[3:].split(",") for pair in _TWO_AND_THREE_LETTERS.split()}


def same_language(name: str, labels: Iterable[str]) -> list[str]:
    """The labels of the language with this name: ``deu_Latn`` of ``de``, and the other way."""
    return [label for label in labels if _codes(label) & _codes(name)]


def _codes(name: str) -> set[str]:
    code = name.partition("_")[0]
    return {code, *_THREE_LETTERS.get(code, ())}
